"""Plugins that are called only while a condition holds: `plugin.when(...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
from heliograph import Between, Every, Plugin, Run, on
from heliograph.tests import kit
from heliograph_recorder import Recorder, replay
from heliograph_testing import check_plugin

WATCHED: tuple[Any, ...] = (
    h.TrainStart, h.EpochStart, h.BatchStart, h.GradientsReady, h.StepEnd, h.BatchEnd, h.ValidationStart,
    h.ValidationBatchEnd, h.ValidationEnd, h.EpochEnd, h.LastBoundary, h.TrainEnd, h.RunClosed,
)  # fmt: skip


class Watch(Plugin):
    """Notes which events came, with the epoch and the step."""

    affects_training = False

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    @on(*WATCHED, optional=True)
    def note(self, run: Run, event: h.Event) -> None:
        self.seen.append((event.name, run.progress.epoch, run.progress.steps))

    def names(self) -> set[str]:
        return {name for name, _, _ in self.seen}


def validating() -> Plugin:
    return h.ValidationSchedule(Every(epochs=1), at_end=False)


def watch(watcher: Watch, *plugins: Plugin, **options: Any) -> h.RunResult:
    """Train for three epochs of two batches, with a validation of two named sets after each."""
    sets = {"seen": kit.class_batches(1), "unseen": kit.class_batches(2)}
    options = {"epochs": 3, "validation": sets, **options}
    return kit.fit(validating(), *plugins, watcher, **options)


def test_the_rules_for_plugins_hold_with_a_condition() -> None:
    check_plugin(lambda: h.EarlyStopping("train/loss", patience=1).when(Between(epochs=(1, 3))))


def test_replayed(tmp_path: Path) -> None:
    """The condition is asked in the replay, as it was in the run."""

    def stopper() -> Plugin:
        return Stop().when(Between(steps=(3, 5)))

    class Stop(Plugin):
        asks = ("log",)

        @on(h.StepEnd, h.ValidationEnd)
        def ask(self, run: Run, event: h.Event) -> None:
            run.control.request_log(f"at {run.progress.steps}")

    result = watch(Watch(), Recorder(tmp_path), stopper())
    asked = [each.reason for each in result.history if each.verb == "log"]
    assert asked == ["at 3", "at 4", "at 4", "at 5"]
    replayed = replay(tmp_path, [stopper()])
    assert [each.reason for each in replayed.requests("stop")] == asked
