"""Runs with WandB and Trackio that are killed by SIGKILL, and resumed: every step is there once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import heliograph as h
import pytest
from heliograph.packages.trackers.tests import tracker_runs
from heliograph.packages.trackers.tests.tracker_runs import (
    KILLED_AT,
    SAVED_AT,
    STEPS,
    Loss,
    trackio_losses,
    trackio_rows,
    wandb_files,
    wandb_losses,
)
from heliograph_trackers.wandb import rows

SCENARIOS = ("lost", "seen", "back")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("killed")
    # Not the service of W&B that an earlier test has started: it would be the trainings', too.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    command = [sys.executable, str(tracker_runs.__file__), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout, done.stderr) == ("step 1\nstep 11\n" * len(SCENARIOS), "")
    return place


class Losses(h.Plugin):
    """Keeps what trackers are given."""

    def __init__(self) -> None:
        self.kept: list[Loss] = []
        self.rollbacks = 0

    @h.on(h.CheckpointLoaded)
    def count(self, run: h.Run, event: h.CheckpointLoaded) -> None:
        self.rollbacks += 1

    @h.on(h.Log)
    def keep(self, run: h.Run, event: h.Log) -> None:
        self.kept.append((run.progress.steps, self.rollbacks, event.metrics["train/loss"]))


def uninterrupted(scenario: str, folder: Path) -> list[Loss]:
    losses = Losses()
    tracker_runs.train(scenario, folder, losses)
    passes = [(step, 0) for step in range(1, STEPS + 1)]
    if scenario == "back":
        passes = [(step, 0) for step in range(1, 15)] + [(step, 1) for step in range(SAVED_AT + 1, STEPS + 1)]
    assert tracker_runs.places(losses.kept) == passes
    return losses.kept


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_step_is_on_the_page_once(scenario: str, folder: Path, tmp_path: Path) -> None:
    """W&B's process dies with the training; its page has one file for each attempt."""
    first, second = wandb_files(folder / scenario)
    assert first.name == second.name
    assert first.parent != second.parent
    in_first = {"lost": 0, "seen": KILLED_AT - 1, "back": 16}
    assert len([row for row in rows(first) if "train/loss" in row]) == in_first[scenario]
    assert wandb_losses(folder / scenario) == uninterrupted(scenario, tmp_path)


def test_rows_that_were_lost_keep_their_attempt(folder: Path) -> None:
    """What W&B had not put on the disk was in the checkpoint."""
    attempts = [row["attempt"] for row in rows(wandb_files(folder / "lost")[1]) if "train/loss" in row]
    assert attempts == [1] * SAVED_AT + [2] * (STEPS - SAVED_AT)


def test_a_resumed_run_replaces_no_part_of_the_console(folder: Path) -> None:
    """The parts of a page have names of their own."""
    parts = {part.name: part for path in wandb_files(folder / "seen") for part in path.parent.glob("files/logs/*.log")}
    assert [parts[name].read_text() for name in sorted(parts)] == ["step 1\n", "step 11\n"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_step_is_in_the_database_once(
    scenario: str, folder: Path, tmp_path: Path, in_folder: Callable[[Path], None]
) -> None:
    in_folder(folder)
    assert trackio_losses(scenario) == uninterrupted(scenario, tmp_path)
    assert trackio_rows(scenario)[-1]["status"]["_value"] == "completed"
