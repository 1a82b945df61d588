"""Plugins that are called only while a condition holds: `plugin.when(...)`."""

from __future__ import annotations

from pathlib import Path

import heliograph as h
from heliograph import Between, Plugin, Run, on
from heliograph.tests.plugins.test_conditions import Watch, watch
from heliograph_recorder import Recorder, replay
from heliograph_testing import check_plugin


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
