"""A stop that was withdrawn is requested again; one that ended its attempt is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.recorder.tests.reruns.failing import Failing
from heliograph.packages.recorder.tests.reruns.test_goto import Witness
from heliograph.packages.recorder.tests.reruns.test_requests import Asking, remote, requests
from heliograph.packages.recorder.tests.reruns.varied import state_of
from heliograph_recorder import diverge, fork, goto

STOP = {"ask": "stop"}


class Withdrawing(h.Plugin):
    """Withdraws stops for some steps, and requests a validation instead."""

    asks = ("validation",)

    @h.on(h.ShouldStop)
    def decide(self, run: h.Run, event: h.ShouldStop) -> None:
        """Decide."""
        if run.control.should_stop and run.progress.steps < 9:
            run.control.withdraw("stop", "too early")
            run.control.request_validation("somebody wanted to stop")


class Vetoing(h.Plugin):
    """Vetoes stops for some steps, and requests a validation besides."""

    asks = ("validation",)

    @h.on(h.ShouldStop)
    def decide(self, run: h.Run, event: h.ShouldStop) -> None:
        """Decide."""
        if run.control.should_stop and run.progress.steps < 9:
            run.control.veto_stop("too early")
            run.control.request_validation("somebody wanted to stop")


def program_of(kind: Callable[[], h.Plugin]) -> Callable[[Path], Any]:
    """Return a program that resumes, and answers stops."""

    def make(folder: Path, *plugins: h.Plugin) -> Any:
        trainer, options = remote(folder, kind(), *plugins)
        trainer.plugins["checkpoint"].resume = h.Resume("auto")
        return trainer, options

    return make


def train(program: Callable[..., Any], folder: Path, *plugins: h.Plugin) -> h.RunResult:
    """Train with plugins that are not part of the program."""
    trainer, options = program(folder)
    for each in plugins:
        trainer.plugins.register(each)
    result: h.RunResult = trainer.fit(**options)
    return result


def forget(folder: Path) -> None:
    """Remove the checkpoints, so that a rerun begins at the start."""
    for each in folder.glob("*.pth"):
        each.unlink()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_stop_that_was_withdrawn_is_withdrawn_again(is_killed: bool, tmp_path: Path) -> None:
    program, folder, witness = program_of(Withdrawing), tmp_path / "x", Witness()
    if is_killed:
        with pytest.raises(RuntimeError, match="killed"):
            train(program, folder, Asking(folder, at4=STOP), Failing(8))
        train(program, folder, witness)
    else:
        train(program, folder, Asking(folder, at4=STOP), witness)
    forget(folder)
    with goto(folder, program, step=11) as paused:
        assert state_of(paused.run) == witness.states[11]
        asked = [(each.what, each.step) for each in paused.run.control.history if "@" in each.by]
        assert asked == [("stop", 5)]
        assert paused.comparison.first is None
    train_on = fork(folder, program, at=7, into=tmp_path / "y")
    assert train_on.status == "completed"
    assert diverge(folder, tmp_path / "y").first is None


def test_a_stop_that_was_vetoed_until_a_kill_ends_the_resumed_run_and_its_rerun(tmp_path: Path) -> None:
    program, folder, witness = program_of(Vetoing), tmp_path / "x", Witness()
    with pytest.raises(RuntimeError, match="killed"):
        train(program, folder, Asking(folder, at4=STOP), Failing(8))
    resumed = train(program, folder, witness)
    assert (resumed.status, resumed.progress.steps) == ("stopped", 9)
    forget(folder)
    with goto(folder, program, step=9) as paused:
        assert state_of(paused.run) == witness.states[9]
        assert paused.comparison.first is None


def test_a_stop_that_was_vetoed_and_ended_its_attempt_later_is_not_requested(tmp_path: Path) -> None:
    program, folder = program_of(Vetoing), tmp_path / "x"
    assert train(program, folder, Asking(folder, at4=STOP)).status == "stopped"
    assert [what for what, *_ in requests(folder)] == ["stop"]
    assert train(program, folder).status == "completed"
    forget(folder)
    with goto(folder, program, step=11, exact=False) as paused:
        assert [each for each in paused.run.control.history if "@" in each.by] == []
