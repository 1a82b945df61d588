"""CSVLog: a row for each step, whatever happens to the process, the columns or the disk."""

from __future__ import annotations

from pathlib import Path

from heliograph.packages.trackers.tests.test_csv_log import read
from heliograph_testing import check_tracker
from heliograph_trackers import CSVLog


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    rows = read(folder / "log.csv")
    names = [name for name in rows[0] if "/" in name]
    return {name: [(int(row["step"]), float(row[name])) for row in rows if row[name]] for name in names}


def test_what_every_tracker_promises() -> None:
    check_tracker(lambda folder: CSVLog(folder / "log.csv"), points)
