"""Plugins on checkpoints that are combined, registered without each other, or late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    Checkpoint,
    CheckpointLabel,
    EpochStart,
    Every,
    LastBoundary,
    LoadBest,
    Plugin,
    Resume,
    Run,
    TrainedOnly,
    Trainer,
    ValidationSchedule,
    VerifyResume,
    WeightsCheckpoint,
    on,
)
from heliograph.core.checkpoint.storage import reader
from heliograph.tests.kit import checkpoint_names, class_batches, fit, linear_classifier, sgd
from heliograph.tests.messages import has_facts

EVERY: dict[str, Any] = {"every": Every(epochs=1), "keep_last": None}
BEST: dict[str, Any] = {"every": Every(epochs=1), "keep_best": 1, "monitor": "validation/loss"}


def train(*plugins: Any, epochs: int = 3, **options: Any) -> Any:
    return fit(*plugins, train=class_batches(2), epochs=epochs, **options)


def test_a_branch_is_known_by_its_content_where_all_have_one_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1.0)
    monkeypatch.setattr("heliograph.core.snapshot.time", lambda: 1.0, raising=False)
    train(Checkpoint(tmp_path, **EVERY))
    before = {name: (tmp_path / name).read_bytes() for name in checkpoint_names(tmp_path)}
    result = train(Checkpoint(tmp_path, every=Every(epochs=1), resume=tmp_path / "run_epoch_1_iter_2.pth"))
    assert any(note.startswith("branched from") for note in result.notes)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_one_that_replaces_waits_for_the_branch_of_another(tmp_path: Path) -> None:
    first, second = tmp_path / "x", tmp_path / "y"
    train(Checkpoint(first, **EVERY).named("first"), Checkpoint(second, **EVERY).named("second"))
    kept = set(checkpoint_names(first))
    replacing = Checkpoint(first, resume=Resume(None, on_existing="replace"), **EVERY).named("first")
    train(replacing, Checkpoint(second, resume=second / "run_epoch_1_iter_2.pth", **EVERY).named("second"))
    assert kept < set(checkpoint_names(first))


def test_a_former_branch_of_a_disabled_plugin_does_not_matter(tmp_path: Path) -> None:
    train(Checkpoint(tmp_path / "x", **EVERY))
    branch = Checkpoint(tmp_path / "x", resume=tmp_path / "x/run_epoch_1_iter_2.pth", **EVERY).named("branch")
    strict = Checkpoint(tmp_path / "y", resume=Resume(None, on_existing="refuse"), **EVERY).named("strict")
    trainer = Trainer([branch, strict], device="cpu")
    train(trainer)
    trainer.plugins.disable("branch")
    with pytest.raises(ValueError, match="on_existing='refuse'"):
        train(trainer)


def test_the_best_that_was_loaded_is_not_missed_where_its_saver_is_disabled(tmp_path: Path) -> None:
    class Disable(Plugin):
        """Disables the saver last."""

        @on(LastBoundary)
        def disable(self, run: Run, event: LastBoundary) -> None:
            run.plugins.disable("checkpoint")

    plugins = [ValidationSchedule(epochs=1), Checkpoint(tmp_path, **BEST), LoadBest(), Disable()]
    result = train(*plugins, validation=class_batches(1))
    assert any(has_facts(note, "loaded back") for note in result.notes)
    assert not [each for each in result.warnings if "nothing back" in each]


class Late(Plugin):
    """Registers a plugin in the first epoch."""

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin

    @on(EpochStart)
    def register(self, run: Run, event: EpochStart) -> None:
        if not event.epoch:
            run.plugins.register(self.plugin)


def test_one_that_comes_late_says_that_it_does_nothing(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path / "a", **BEST)
    result = train(ValidationSchedule(epochs=1), saver, Late(LoadBest()), validation=class_batches(1))
    assert any("LoadBest loaded nothing:" in each for each in result.warnings)

    task = linear_classifier()
    task.model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD((each for each in task.model.parameters() if each.requires_grad), lr=0.1)
    result = train(Checkpoint(tmp_path / "b", **EVERY), Late(TrainedOnly()), task=task, optimizer=optimizer)
    assert result.last_checkpoint is not None
    assert "bias" in reader.load(result.last_checkpoint)["modules"]["model"]


@pytest.mark.parametrize(
    ("plugin", "fact"),
    [
        (TrainedOnly(), "TrainedOnly has no effect"),
        (CheckpointLabel("{train/loss:.2f}"), "CheckpointLabel has no effect"),
        (VerifyResume("raise"), "VerifyResume compares nothing"),
    ],
)
def test_without_a_checkpoint_it_says_so(plugin: Plugin, fact: str) -> None:
    assert any(fact in each for each in train(plugin).warnings)


def test_weights_alone_are_not_compared(tmp_path: Path) -> None:
    result = train(VerifyResume("raise"), WeightsCheckpoint(tmp_path, every=Every(epochs=1)))
    assert any("VerifyResume compares nothing" in each for each in result.warnings)


@pytest.mark.parametrize("background", [False, True])
def test_a_state_is_reduced_as_a_whole(background: bool, tmp_path: Path) -> None:
    class Drop(Plugin):
        """Leaves out plugins' state."""

        def reduce_state(self, run: Run, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, "plugins": {name: each for name, each in state["plugins"].items() if name != "x"}}

        @on(EpochStart)
        def look(self, run: Run, event: EpochStart) -> None:
            pass

    result = train(Checkpoint(tmp_path, background=background, **EVERY), Drop(), optimizer=sgd())
    assert len(checkpoint_names(tmp_path)) == 3
    assert result.warnings == ()
