"""A fork that ended before its first save is neither continued nor begun as another training: it is forked again."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import heliograph as h
import heliograph_recorder
import pytest
from heliograph.builtin_callbacks.checkpoint.resume import UNSAVED_FORK
from heliograph.packages.recorder.tests.reruns.test_fork import halve_rate, program, state_of, trained
from heliograph.packages.tests.facts import assert_each, has_facts


class Copying(h.Plugin):
    """Copies a folder in the middle of a step: what a kill there would leave."""

    affects_training = False

    def __init__(self, folder: Path, to: Path, step: int) -> None:
        self._folder, self._to, self._step = folder, to, step

    @h.on(h.GradientsReady, lane=h.Lane.REPORT)
    def copy(self, run: h.Run, event: h.GradientsReady) -> None:
        """Copy."""
        if run.progress.steps + 1 == self._step:
            shutil.copytree(self._folder, self._to)


def checkpoints(folder: Path) -> list[str]:
    """Return the names of what could be resumed."""
    return sorted(each.name for each in folder.rglob("*.pth"))


@pytest.mark.parametrize("kill", [4, 5, 6])  # after a scheduled save, right before the change, right after it
def test_a_kill_before_its_first_save(kill: int, tmp_path: Path) -> None:
    trained(tmp_path / "x")
    for each in (tmp_path / "x").glob("*.pth"):
        each.unlink()  # so that a scheduled save lies on the way
    killed = tmp_path / "killed"
    whole = heliograph_recorder.fork(
        tmp_path / "x", lambda folder: program(folder, Copying(folder, killed, kill)), at=5, into=tmp_path / "y",
        change=halve_rate,
    )  # fmt: skip
    assert checkpoints(killed) == []
    trainer, options = program(killed)
    with pytest.raises(ValueError, match=r"step 5.* first save"):
        trainer.fit(**options)
    again = heliograph_recorder.fork(tmp_path / "x", program, at=5, into=killed, change=halve_rate)
    assert state_of(again.last_checkpoint) == state_of(whole.last_checkpoint)
    assert checkpoints(killed) == checkpoints(tmp_path / "y")
    assert "iter_3" not in "".join(checkpoints(killed))
    assert not list(killed.rglob(UNSAVED_FORK))
    with pytest.raises(ValueError, match="already has a training"):
        heliograph_recorder.fork(tmp_path / "x", program, at=5, into=killed, change=halve_rate)


def test_a_kill_after_its_first_save_is_resumed(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    killed = tmp_path / "killed"
    whole = heliograph_recorder.fork(
        tmp_path / "x", lambda folder: program(folder, Copying(folder, killed, 7)), at=5, into=tmp_path / "y",
        change=halve_rate,
    )  # fmt: skip
    trainer, options = program(killed)
    resumed = trainer.fit(**options)
    assert resumed.resume is not None
    assert resumed.resume.step == 6
    assert state_of(resumed.last_checkpoint) == state_of(whole.last_checkpoint)


class Terminating(h.Plugin):
    """Sends the signal of a cluster after a step."""

    affects_training = False

    @h.on(h.StepEnd)
    def terminate(self, run: h.Run, event: h.StepEnd) -> None:
        """Send it."""
        if run.progress.steps == 4:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("ends", ["raise", "return"])
def test_a_preemption_before_its_step_saves_nothing_and_says_so(
    ends: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "x")
    facts = ("Nothing was changed", "step 5")

    def preempted(folder: Path) -> Any:
        return program(folder, Terminating(), h.Preemption(), on_interrupt=ends)

    def fork() -> h.RunResult:
        return heliograph_recorder.fork(tmp_path / "x", preempted, at=5, into=tmp_path / "y", change=halve_rate)

    if ends == "raise":
        with pytest.raises(SystemExit):
            fork()
        assert not (tmp_path / "y").exists()
    else:
        assert_each(fork().warnings, facts)
        assert checkpoints(tmp_path / "y") == []
    assert any(has_facts(message, *facts) for message in caplog.messages)
    assert (
        heliograph_recorder.fork(tmp_path / "x", program, at=5, into=tmp_path / "y", change=halve_rate).warnings == ()
    )


def test_a_folder_that_is_marked_is_begun_by_another_training_that_says_so(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    killed = tmp_path / "killed"
    heliograph_recorder.fork(
        tmp_path / "x", lambda folder: program(folder, Copying(folder, killed, 5)), at=5, into=tmp_path / "y"
    )
    trainer, options = program(killed)
    trainer.plugins["checkpoint"].resume = h.Resume(None)
    assert trainer.fit(**options).progress.steps == 10
    trainer, options = program(killed, epochs=3)
    resumed = trainer.fit(**options).resume
    assert resumed is not None
    assert resumed.step == 10
