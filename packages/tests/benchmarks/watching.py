"""What it takes `watch` to make the page of a long recording."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

from heliograph.packages.recorder.tests.long_recordings import write_long
from heliograph_recorder.watch.run_list import WatchedRun

PAGE = "1,000,000 batches, opened for the first time"
BATCHES, ROUNDS = 1_000_000, 3


def open_page(seed: int) -> dict[str, list[float]]:  # as all that measure
    """Return the milliseconds of each time."""
    spent: list[float] = []
    with TemporaryDirectory() as name:
        path = Path(name) / "long.recording"
        write_long(path, BATCHES)
        for _ in range(ROUNDS):
            begin = process_time()
            WatchedRun(path, "long").facts()
            spent.append((process_time() - begin) * 1e3)
    return {PAGE: spent}
