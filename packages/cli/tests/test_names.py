"""Short forms, written out."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from heliograph_cli.names import full_arguments, full_forms, path_of

full = full_forms(yaml.safe_load)


def test_a_name_with_arguments_is_a_class_path_with_init_args() -> None:
    assert full("model: {my.Net: {hidden: 3, head: {my.Head: {}}}}") == {
        "model": {"class_path": "my.Net", "init_args": {"hidden": 3, "head": {"class_path": "my.Head"}}}
    }


def test_what_a_keyword_of_any_kind_takes_is_kept_apart() -> None:
    """As jsonargparse has it, which does not know these keywords."""
    made = full("trainer: {plugins: {compile: {fallback: false, mode: default}}}")["trainer"]["plugins"]
    assert [each["dict_kwargs"] for each in made] == [{"fallback": False, "mode": "default"}]


@pytest.mark.parametrize(
    "text",
    [
        "{trainer: {plugins: {early_stopping: {patience: 3}, progress: }}}",
        "{trainer: {plugins: [{early_stopping: {patience: 3}}, progress]}}",
        "{trainer: {plugins: [{class_path: early_stopping, init_args: {patience: 3}}, {progress: }]}}",
    ],
)
def test_plugins_are_a_list_or_a_mapping_of_names(text: str) -> None:
    stop, bar = full(text)["trainer"]["plugins"]
    assert stop["class_path"].endswith(".EarlyStopping")
    assert stop["init_args"] == {"patience": 3}
    assert bar["class_path"].endswith(".ProgressBar")
    assert set(bar) == {"class_path"}


def test_several_by_name_are_written_out_each() -> None:
    assert full("validation: {clean: my.data, noisy: {my.data: {noise: 1}}}")["validation"] == {
        "clean": {"class_path": "my.data"},
        "noisy": {"class_path": "my.data", "init_args": {"noise": 1}},
    }


@pytest.mark.parametrize(
    "value", ["{a: 1, b.c: 2}", "{not-a.path: {}}", "{validation/loss: {a: 1}}", "{b.c: 2}", "b.c", "[1, 2]"]
)
def test_other_values_stay_as_they_are(value: str) -> None:
    assert full(f"hyper_parameters: {value}") == yaml.safe_load(f"hyper_parameters: {value}")


def test_a_public_name_is_one_too_and_a_class_path_stays() -> None:
    assert path_of("Supervised") == "heliograph.Supervised"
    assert path_of("my.own.Plugin") == "my.own.Plugin"
    with pytest.raises(LookupError, match="Did you mean 'early_stopping'"):
        path_of("early_stoping")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--epochs=3", "--name", "a.b"], ["--epochs=3", "--name", "a.b"]),
        (["--task", "my.Task"], ['--task={"class_path": "my.Task"}']),
        (["--optimizer=torch.optim.SGD"], ["--optimizer=torch.optim.SGD"]),
        (["--trainer.engine=ddp"], ["--trainer.engine=ddp"]),
        (["--trainer.plugins+=my.P"], ['--trainer.plugins+=[{"class_path": "my.P"}]']),
        (["--trainer.plugins.help", "Supervised"], ["--trainer.plugins.help", "heliograph.Supervised"]),
        (["--trainer={plugins: {my.P: }}"], ['--trainer={"plugins": [{"class_path": "my.P"}]}']),
        (["--trainer.plugins.patience=3"], ["--trainer.plugins.patience=3"]),
    ],
)
def test_options_are_written_out(given: list[Any], expected: list[Any]) -> None:
    assert full_arguments(given, yaml.safe_load) == expected
