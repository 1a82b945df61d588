"""The rows in W&B's files, also in one that a kill cut off."""

from __future__ import annotations

from pathlib import Path

import heliograph as h
import pytest
import wandb
from heliograph.packages.trackers.tests.tracker_runs import wandb_files
from heliograph.tests.kit import class_batches, fit
from heliograph_trackers import WandB
from heliograph_trackers.wandb import BLOCK, last_steps, rows

STEPS = 300


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    fit(h.LogSchedule(h.Every(steps=1)), WandB(mode="offline", folder=folder), train=class_batches(STEPS))
    wandb.teardown()  # the file is whole then
    (path,) = wandb_files(folder)
    assert path.stat().st_size > 2 * BLOCK
    return path


def test_every_row_is_read(file: Path) -> None:
    assert [row["step"] for row in rows(file)] == list(range(1, STEPS + 1))
    page = file.stem.removeprefix("run-")
    found = last_steps(file.parents[1], page)
    assert (found["train/loss", 0], found["step", 0]) == (STEPS, STEPS)
    assert last_steps(file.parents[1], "another") == {}


@pytest.mark.parametrize("size", [0, 7, 9, 5_000, BLOCK - 3, BLOCK, BLOCK + 3, BLOCK + 9, BLOCK + 5_000])
def test_a_file_that_was_cut_off_is_read_up_to_there(size: int, file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.wandb"
    cut.write_bytes(file.read_bytes()[:size])
    found = [row["step"] for row in rows(cut)]
    assert found == list(range(1, len(found) + 1))
    assert (len(found) > 20) == (size >= BLOCK - 3)
