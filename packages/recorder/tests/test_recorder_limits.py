"""The recorder when its file reaches a size limit of the system."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import heliograph as h
import pytest
from heliograph.packages.recorder.tests.recordings import fit
from heliograph.packages.tests.facts import assert_facts, has_facts
from heliograph_recorder import Recorder
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import Batches
from heliograph_recorder.replays.replay import replay


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of the files that this process writes; Python ignores the signal SIGXFSZ."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [10, 300, 5_000])
def test_a_file_at_its_size_limit_ends_no_run_and_can_be_read(size: int, tmp_path: Path) -> None:
    with files_of_at_most(size):
        result, _ = fit([h.LogSchedule(h.Every(steps=1)), Recorder(tmp_path)], batches=64, validation=None)
    assert (result.status, result.progress.steps) == ("completed", 128)
    assert all("File too large" in error for error in result.plugin_errors["recorder"])
    assert_facts(result.explain(), "the run: completed\n", "2 epochs done\n")
    if size == 10:
        assert not list(tmp_path.iterdir())
        return
    (attempt,) = read(tmp_path).attempts
    assert len(attempt.damage) <= 1  # none if the file ends between two lines
    assert all(has_facts(each, "cut short", "damaged") for each in attempt.damage)
    steps = [batch.counters.steps for entry in attempt.entries if isinstance(entry, Batches) for batch in entry]
    assert steps == list(range(1, len(steps) + 1))
    assert bool(steps) == (size > 300)
    assert not replay(tmp_path, [h.LogSchedule(h.Every(steps=2))]).failed
