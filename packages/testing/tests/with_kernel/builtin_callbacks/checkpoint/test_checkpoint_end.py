"""Checkpoint at the end of a run: what is saved, judged and loaded back there, what is missing, and how to resume."""

from __future__ import annotations

from pathlib import Path

from heliograph import Checkpoint, Every, Preemption, SaveSchedule, ValidationSchedule
from heliograph.tests import kit
from heliograph.tests.kit import class_batches
from heliograph_testing.chaos import Chaos, Fault

# The end of a run that ends within an epoch.


def test_after_a_signal_nothing_is_validated_at_the_end(tmp_path: Path) -> None:
    notice = Chaos([Fault("preempt", count=3)], journal=tmp_path / "journal.jsonl")
    plugins = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1)), Preemption(), notice]
    result = kit.fit(
        *plugins,
        Checkpoint(tmp_path),
        train=class_batches(6),
        validation=class_batches(2),
        on_interrupt="return",
    )
    assert (result.status, result.progress.validations, result.warnings) == ("stopped", 0, ())
    assert [request.verb for request in result.history] == ["stop", "save"]
    (note,) = [each for each in result.notes if each.startswith("the newest checkpoint is")]
    path = result.last_checkpoint
    assert path is not None
    assert note == (
        f"the newest checkpoint is {path}, of step {result.progress.steps}, no step is lost; to resume it, "
        f"Checkpoint('{tmp_path}', resume='{path}')"
    )


# Which checkpoint is the best.


# What is missing is said.


# What is lost, and how to resume.


# The weights that were measured are those that are loaded.
