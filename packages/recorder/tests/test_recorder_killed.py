"""A killed run leaves a readable recording, and a resumed run continues it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from heliograph.packages.recorder.tests import recorder_kills
from heliograph.tests import sampling
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import AttemptRecord, Batches, EventEntry, walk

POINTS = [
    *(f"batch{number}:batch:{number}" for number in (1, 7, 33)),
    "validation:validation:5",
    "save:save:2",
    *(f"{where}{number}:{where}:{number}" for where in ("before", "within", "after") for number in (3, 8)),
]
RESUMED = ["again:batch:13", "again:within:8", "again:save:1", "again:after:6", "again:validation:2", "again:none:0"]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the trainings."""
    path = tmp_path_factory.mktemp("killed")
    points = [point for point in POINTS if point.split(":")[0] in sampling.chosen(request, "name")]
    command = [sys.executable, recorder_kills.__file__, str(path), *points, *RESUMED]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    return path


def witnessed(path: Path) -> list[tuple[float, ...]]:
    """Return what the witness noted: epoch, batch, steps, samples, seconds, window."""
    return [tuple(float(each) for each in line.split()) for line in path.read_text().splitlines()]


def recorded(attempt: AttemptRecord) -> list[tuple[float, ...]]:
    """Return the same from a recording."""
    batches = [batch for entry in attempt.entries if isinstance(entry, Batches) for batch in entry]
    return [
        (
            each.counters.epoch,
            each.counters.batch,
            each.counters.steps,
            each.counters.samples,
            each.counters.seconds,
            each.window,
        )
        for each in batches
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [point.split(":")[0] for point in POINTS])
def test_a_kill_loses_the_last_batches_only(name: str, folder: Path) -> None:
    recording = read(folder / name)
    (attempt,) = recording.attempts
    batches = witnessed(folder / name / "witness")
    shared = min(len(recorded(attempt)), len(batches))
    assert recorded(attempt)[:shared] == batches[:shared]
    assert len(batches) - 4 <= len(recorded(attempt)) <= len(batches) + 1  # a log every 3 steps, of 2 batches each
    assert attempt.status is None
    assert len(attempt.damage) == (1 if name.startswith("within") else 0)


def test_a_resumed_run_continues_the_file(folder: Path) -> None:
    (path,) = (folder / "again").glob("*.recording")
    recording = read(path)
    assert [each.status for each in recording.attempts] == [None] * 5 + ["completed"]
    witness = iter(witnessed(folder / "again" / "witness"))
    assert all(batch in witness for attempt in recording.attempts for batch in recorded(attempt))  # in this order
    loaded = [each for each in recording.attempts[-1].entries if isinstance(each, EventEntry)][1]
    assert loaded.event == "checkpoint_loaded"
    assert Path(loaded.data["path"]).parent == folder / "again" / "checkpoints"
    assert sorted(each.name for each in (folder / "again").iterdir()) == ["checkpoints", path.name, "witness"]


def test_entries_that_are_not_lost_are_one_training(folder: Path) -> None:
    kept = [each.entry for each in walk(read(folder / "again")) if isinstance(each.entry, Batches) and not each.lost]
    batches = [batch.counters.batches for entry in kept for batch in entry]
    assert batches == list(range(1, 41))
