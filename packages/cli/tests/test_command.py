"""`python -m heliograph fit`, `validate`, `test` and `predict` of one file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from heliograph import EarlyStopping, Trainer, read_predictions
from heliograph.__main__ import main
from heliograph.packages.cli.tests.conftest import Command
from heliograph.packages.tests.facts import assert_facts
from heliograph_cli import command
from heliograph_cli.parser import make_parser


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return what each call of fit is given, with the trainer; nothing is trained."""
    calls = list[dict[str, Any]]()

    def record(trainer: Trainer, task: Any, train: Any, **options: Any) -> str:
        calls.append({"trainer": trainer, "task": task, "train": train, **options})
        return "nothing was trained"

    record.__doc__ = Trainer.fit.__doc__  # of which the parser makes its help
    monkeypatch.setattr(Trainer, "fit", record)
    return calls


def plugins(call: dict[str, Any]) -> list[str]:
    return [plugin.name for plugin in call["trainer"].plugins]


def test_a_file_gives_all_that_fit_takes(fit: Command, fitted: list[dict[str, Any]]) -> None:
    assert fit() == 0
    (call,) = fitted
    assert plugins(call) == ["rng_capture", "learning_rate", "checkpoint", "verify_resume", "kill", "config_file"]
    assert str(call["trainer"].plugins["checkpoint"].every) == "every 2 steps"
    assert call["task"].model[0].out_features == 3
    assert call["task"].loss_fn is torch.nn.functional.cross_entropy
    assert len(call["train"]) == 12
    assert call["loader_params"] == {"batch_size": 4, "shuffle": True}
    assert call["epochs"] == 2
    made = call["optimizer"](call["task"].model.parameters())
    assert type(made) is torch.optim.AdamW
    assert made.defaults["lr"] == 0.01
    assert type(call["scheduler"](made, 10)).__name__ == "WarmupCosine"


@pytest.mark.sample(5)
@pytest.mark.parametrize("given", [["lesson.yaml"], ["--config=lesson.yaml"], ["--config", "lesson.yaml"]])
@pytest.mark.parametrize(
    ("mode", "warns"), [(0o644, False), (0o600, False), (0o664, True), (0o646, True), (0o666, True)]
)
def test_a_file_that_others_can_write_is_warned_of(
    mode: int, warns: bool, given: list[str], folder: Path, fitted: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "lesson.yaml").chmod(mode)
    assert main(["fit", *given]) == 0
    err = capsys.readouterr().err
    assert len(fitted) == 1
    assert err.count("other users can write lesson.yaml") == warns
    assert ("chmod go-w" in err) == warns


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_a_file_of_another_user_is_warned_of_before_anything_in_it_is_called(
    verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    (folder / "lesson.py").write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit):
        main([verb, "lesson.yaml"])
    assert "other users can write lesson.yaml" in capsys.readouterr().err


def test_the_help_says_that_a_configuration_is_code(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    assert "every class and function" in " ".join(capsys.readouterr().out.split())


def test_the_seed_is_that_of_everything_that_is_made(fit: Command, fitted: list[dict[str, Any]]) -> None:
    fit(), fit(), fit("--seed=4")
    first, again, other = (call["task"].model[0].weight for call in fitted)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_options_win_over_the_file(fit: Command, fitted: list[dict[str, Any]]) -> None:
    assert fit("--task.model.hidden=7", "--optimizer.lr", "0.5", "--train.count=5", "--steps=9", "--name=other") == 0
    (call,) = fitted
    assert call["task"].model[0].out_features == 7
    assert call["optimizer"](call["task"].model.parameters()).defaults["lr"] == 0.5
    assert (len(call["train"]), call["steps"], call["name"]) == (5, 9, "other")


def test_a_null_is_given_on(fit: Command, fitted: list[dict[str, Any]]) -> None:
    """It means any number here; left out, it is 100."""
    fit("--max_skipped_steps=null"), fit()
    assert [call.get("max_skipped_steps", "left out") for call in fitted] == [None, "left out"]


def test_a_later_file_wins_over_a_former_one(folder: Path, fitted: list[dict[str, Any]]) -> None:
    (folder / "long.yaml").write_text("epochs: 50\noptimizer: {torch.optim.SGD: {lr: 1.0}}\n")
    assert main(["fit", "lesson.yaml", "long.yaml", "--epochs=40"]) == 0
    assert fitted[0]["epochs"] == 40
    assert type(fitted[0]["optimizer"](fitted[0]["task"].model.parameters())) is torch.optim.SGD


def test_plugins_are_added_and_their_options_set(fit: Command, fitted: list[dict[str, Any]]) -> None:
    assert fit("--trainer.plugins+=early_stopping", "--trainer.plugins.patience=7") == 0
    stop = fitted[0]["trainer"].plugins["early_stopping"]
    assert isinstance(stop, EarlyStopping)
    assert stop.patience == 7
    assert plugins(fitted[0])[-2:] == ["early_stopping", "config_file"]


def test_an_option_reaches_the_plugin_that_it_names(fit: Command, fitted: list[dict[str, Any]]) -> None:
    own = ["--trainer.plugins.checkpoint.every", "{steps: 5}", "--trainer.plugins.learning_rate.per=epoch"]
    assert fit(*own, "--trainer.plugins.checkpoint.folder=2026", "--trainer.plugins+=early_stopping") == 0
    assert fit("--trainer.plugins+=early_stopping", "--trainer.plugins.early_stopping.patience=7", *own) == 0
    for call, folder in zip(fitted, ("2026", "runs"), strict=True):
        made = call["trainer"].plugins
        assert plugins(call) == [
            "rng_capture",
            "learning_rate",
            "checkpoint",
            "verify_resume",
            "kill",
            "early_stopping",
            "config_file",
        ]
        assert str(made["checkpoint"].every) == "every 5 steps"
        assert made["learning_rate"].per == "epoch"
        assert str(made["checkpoint"].folder) == folder
    assert made["early_stopping"].patience == 7


def test_a_function_may_return_several_plugins(fit: Command, fitted: list[dict[str, Any]]) -> None:
    assert fit("--trainer.plugins={lesson.usual: {every: 2}}", "--trainer.plugins+=progress") == 0
    assert plugins(fitted[0]) == ["validation_schedule", "early_stopping", "progress", "config_file"]
    assert fitted[0]["trainer"].plugins["early_stopping"].patience == 9


def test_functions_make_tasks_optimizers_and_data_modules_are_data(fit: Command, fitted: list[dict[str, Any]]) -> None:
    own = ["--task={lesson.make_own: {scale: 2.0}}", "--optimizer=lesson.sgd", "--scheduler=null", "--train=null"]
    assert fit(*own, "--data={lesson.Data: {count: 8}}") == 0
    (call,) = fitted
    assert call["task"].scale == 2.0
    assert call["train"].count == 8
    assert type(call["optimizer"](call["task"].net.parameters())) is torch.optim.SGD
    assert "scheduler" not in call


def test_several_sets_and_optimizers_have_names(fit: Command, fitted: list[dict[str, Any]]) -> None:
    two = "--optimizer={a: {torch.optim.SGD: {lr: 0.5}}, b: torch.optim.Adam}"
    assert fit("--validation={clean: lesson.data, few: {lesson.data: {count: 2}}}", two, "--scheduler=null") == 0
    (call,) = fitted
    assert {name: len(each) for name, each in call["validation"].items()} == {"clean": 12, "few": 2}
    weights = call["task"].model.parameters
    assert [type(make(weights())).__name__ for make in call["optimizer"].values()] == ["SGD", "Adam"]


@pytest.mark.parametrize(
    ("options", "name"),
    [(["--trainer.engine=device"], "DeviceEngine"), (["--trainer.engine={device: {precision: bf16}}"], "DeviceEngine")],
)
def test_an_engine_is_named(fit: Command, fitted: list[dict[str, Any]], options: list[str], name: str) -> None:
    device = [] if "{" in options[0] else ["--trainer.device=cpu"]
    (Path("lesson.yaml")).write_text(Path("lesson.yaml").read_text().replace("  device: cpu\n", ""))
    assert fit(*options, *device) == 0
    engine = fitted[0]["trainer"].engine
    assert type(engine).__name__ == name
    assert engine.precision.name == ("fp32" if device else "bf16")


def test_hyper_parameters_are_the_configuration_by_its_words(fit: Command, fitted: list[dict[str, Any]]) -> None:
    assert fit("--hyper_parameters={epochs: mine, note: x}") == 0
    given = fitted[0]["hyper_parameters"]
    assert given["optimizer"] == "torch.optim.AdamW"
    assert given["optimizer.lr"] == 0.01
    assert given["task.model.hidden"] == 3
    assert given["trainer.plugins.2.every.steps"] == 2
    assert (given["epochs"], given["note"]) == ("mine", "x")


def test_the_configuration_is_printed_and_can_be_used_again(
    fit: Command, folder: Path, capsys: pytest.CaptureFixture[str], fitted: list[dict[str, Any]]
) -> None:
    with pytest.raises(SystemExit) as ended:
        fit("--epochs=5", "--print_config")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["trainer"]["plugins"][2]["init_args"]["every"] == {"steps": 2}
    (folder / "printed.yaml").write_text(text)
    with pytest.raises(SystemExit):
        main(["fit", "printed.yaml", "--print_config"])
    assert capsys.readouterr().out == text
    assert fitted == []


def test_help_shows_the_options_of_fit_of_plugins_and_of_classes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, expected in (
        (["--help"], "(type: int | null)"),
        (["--trainer.plugins.help", "early_stopping"], "without an improvement. (type:"),
        (["--task.help=lesson.Own"], "--task.scale SCALE"),
        (["--optimizer.help", "torch.optim.SGD"], "--optimizer.momentum MOMENTUM"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["fit", *words])
        assert ended.value.code == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert expected in shown


def test_one_file_is_trained_validated_tested_and_predicted_with(
    fit: Command, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit() == 0
    assert "completed: 2 epochs done" in capsys.readouterr().out
    options = ["--validation=lesson.data", "--test={lesson.data: {count: 8}}", "--predict=lesson.data"]
    for verb in ("validate", "test"):
        assert fit(*options, "--weights=last", verb=verb) == 0
        assert "weights of runs/run_epoch_2_iter_6.pth" in capsys.readouterr().out
    writer = "--trainer.plugins+={prediction_writer: {folder: out}}"
    assert fit(*options, "--weights=last", "--limit=2", writer, verb="predict") == 0
    assert read_predictions(folder / "out").shape == (8, 2)


def test_an_evaluation_needs_its_data(fit: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(verb="test") == 2
    assert_facts(capsys.readouterr().err, "heliograph test: ", "test:", "data:")


def weights(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.pth")
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return {key: state[key] for key in ("modules", "optimizers", "schedulers", "plugins")}


def run(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("COV", "HELIOGRAPH_"))}
    command = [sys.executable, "-m", "heliograph", "fit", "lesson.yaml", *options]
    return subprocess.run(command, cwd=folder, env=kept | environment, capture_output=True, text=True, timeout=120)


def copy(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    for file in ("lesson.py", "lesson.yaml"):
        (made / file).write_text((folder / file).read_text())
    return made


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.whole)])
def test_killed_and_started_again_with_the_same_command_it_equals_the_uninterrupted_one(
    fit: Command, folder: Path, ranks: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [] if ranks == 1 else ["--ranks=2", "--loader_params.batch_size=2"]
    whole, killed = copy(folder, "whole"), copy(folder, "killed")
    monkeypatch.chdir(whole)
    assert fit(*options) == 0
    first = run(killed, *options, KILL_AT="5")
    assert first.returncode == (-signal.SIGKILL if ranks == 1 else 1), first.stderr
    (before,) = (killed / "runs").glob("*.pth")
    assert before.name == "run_epoch_1_iter_4.pth"
    file = (killed / "runs/run.config.yaml").read_bytes()

    capfd.readouterr()
    monkeypatch.chdir(killed)
    assert fit(*options) == 0
    again = capfd.readouterr().out
    assert "resumed at step 4;" in again
    assert "the configuration has changed" not in again
    assert equal(weights(whole / "runs"), weights(killed / "runs"))
    assert (killed / "runs/run.config.yaml").read_bytes() == file


def test_the_saved_file_resumes_too(fit: Command, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--epochs=1") == 0
    assert main(["fit", "runs/run.config.yaml", "--epochs=2"]) == 0
    text = capsys.readouterr().out
    assert "epoch 1, batch 0," in text
    assert "training: epochs 1 ->" in text
    assert [path.name for path in (folder / "runs").glob("*.yaml")] == ["run.config.yaml"]
    assert yaml.safe_load((folder / "runs/run.config.yaml").read_text())["epochs"] == 2


@pytest.mark.parametrize(
    ("how", "kind"), [("fail", ValueError), ("exit", SystemExit), ("interrupt", KeyboardInterrupt)]
)
def test_endings_leave_the_command_as_they_leave_fit(
    fit: Command, monkeypatch: pytest.MonkeyPatch, how: str, kind: type[BaseException]
) -> None:
    monkeypatch.setenv("FAILS_BY", how)
    with pytest.raises(kind) as raised:
        fit("--trainer.plugins+=lesson.Failing")
    assert getattr(raised.value, "code", 75) == 75


def test_an_error_in_the_users_code_is_raised_with_the_place(fit: Command) -> None:
    with pytest.raises(KeyError, match="in the data") as raised:
        fit("--train=lesson.broken")
    assert_facts(raised.value.__notes__[0], "creating the configuration")


def test_two_ranks_train_as_two_processes(fit: Command, capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    assert fit("--ranks=2", "--epochs=1") == 0
    assert "samples 12" in capfd.readouterr().out
    assert "ranks" not in yaml.safe_load((folder / "runs/run.config.yaml").read_text())
    assert fit("--ranks=1", "--trainer.plugins+=early_stopping", "--trainer.plugins.patience=0") == 2
    assert_facts(capfd.readouterr().err, "patience must be")


def test_without_jsonargparse_the_line_that_installs_it_is_said(
    fit: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "make_parser", make_parser)
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert fit() == 2
    assert "pip install 'heliograph[cli]'" in capsys.readouterr().err


def test_other_commands_import_none_of_it() -> None:
    code = (
        "import sys, heliograph.__main__ as m; m.main(['events']); print([x for x in sys.modules if 'argparse' in x])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['argparse']"


def equal(one: Any, other: Any) -> bool:
    """Return whether two states are equal to the last bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one if key != "seconds")
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
