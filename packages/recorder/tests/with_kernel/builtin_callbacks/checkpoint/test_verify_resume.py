"""What a resumed run does again is compared with what the killed run had done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.builtin_callbacks.checkpoint.verify_resume import HIDDEN_STATE
from heliograph.packages.recorder.tests.with_kernel import repeated_kills
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.tests import kit, sampling
from heliograph.tests.builtin_callbacks.checkpoint.test_verify_resume import Counting
from heliograph.tests.kit import adam, random_batches, saving
from heliograph_recorder import Recorder, replay
from torch import nn

# Real kills.


@pytest.fixture(scope="module")
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the trainings wrote: "counts", and those that the sample has drawn."""
    folder = tmp_path_factory.mktemp("killed")
    names = {"counts", *sampling.chosen(request, "name")}
    command = [sys.executable, repeated_kills.__file__, str(folder), *names]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    return folder


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("plain", [[13, 3, None]]),
        ("chain", [[13, 3, None], [19, 4, None]]),
        ("at_the_save", [[15, 5, None]]),
        ("leaves_out", [[13, 2, None]]),
        ("two_losses", [[13, 3, None]]),
        ("accumulates", [[33, 1, None]]),
        ("counts", [[13, 2, ": loss "]]),
        ("second_loss_differs", [[12, 1, "the other losses"]]),
    ],
)
def test_every_step_that_a_kill_undid_is_compared(killed: Path, name: str, reported: list[Any]) -> None:
    result = json.loads((killed / name / "result").read_text())
    lines = [json.loads(line) for line in (killed / name / "reported").read_text().splitlines()]
    assert [line[:2] for line in lines] == [line[:2] for line in reported]
    assert_each([line[2] for line in lines], *[(str(line[2]),) for line in reported])
    _, steps, difference = lines[-1]
    assert (result["steps"], result["difference"]) == (steps, difference)
    verified = f"verified: {steps} repeated step{'s are' if steps > 1 else ' is'} bitwise identical"
    assert (difference or verified) in result["text"]
    assert verified in result["story"]


def test_a_difference_is_reported_with_its_likely_cause(killed: Path) -> None:
    result = json.loads((killed / "counts" / "result").read_text())
    assert_each(result["reasons"], ("untracked", "module __main__.calls", "functools._lru_cache_wrapper"))
    assert any(HIDDEN_STATE in line for line in result["text"].splitlines())
    assert "DIVERGED at step 13:" in result["story"]


# Runs that end between two saves stand for killed ones.


def fit(
    folder: Path, steps: int, *plugins: Any, at: int = 0, resume: str | None = "auto", seed: int = 0, **options: Any
) -> h.RunResult:
    torch.manual_seed(seed)
    savers = saving(folder, h.Every(steps=5), resume=resume)
    options = {"train": random_batches(10, 3), "optimizer": adam(), **options}
    return kit.fit(*savers, *plugins, task=Counting(nn.Linear(4, 2), at), steps=steps, **options)


# The file.


# A device that takes its time, and a loop that keeps its losses.


# Where it is reported.


def test_a_recording_reports_and_replays(tmp_path: Path) -> None:
    fit(tmp_path, 9, Recorder(tmp_path))
    result = fit(tmp_path, 12, Recorder(tmp_path), at=2)
    assert result.recording is not None
    assert "verified: 1 repeated step" in result.explain()
    from heliograph_recorder.format.reader import read
    from heliograph_recorder.timeline.page import page

    recording = read(result.recording)
    assert "verified: 1 repeated step" in page(recording)
    assert "DIVERGED at step 7" in page(recording)

    class Receives(h.Plugin):
        affects_training = False

        def __init__(self) -> None:
            self.received: list[Any] = []

        @h.on(h.ResumeVerified)
        def receive(self, run: h.Run, event: h.ResumeVerified) -> None:
            self.received.append((run.progress.steps, event))

    receives = Receives()
    replay(result.recording, [receives])
    ((step, event),) = receives.received
    assert (step, event.steps) == (7, 1)
    assert_facts(event.difference, "DIVERGED at step 7", "3.014", "2.01")


# Several ranks.
