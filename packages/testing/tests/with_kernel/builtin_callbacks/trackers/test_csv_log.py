"""CSVLog: a row for each step, whatever happens to the process, the columns or the disk."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.tests import kit
from heliograph.tests.kit import class_batches
from heliograph_testing import check_tracker


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows as a spreadsheet reads them."""
    content = path.read_bytes()
    assert content.endswith(b"\n")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def columns(path: Path, *names: str) -> list[tuple[str, ...]]:
    return [tuple(row[name] for name in names) for row in read(path)]


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    rows = read(folder / "log.csv")
    names = [name for name in rows[0] if "/" in name]
    return {name: [(int(row["step"]), float(row[name])) for row in rows if row[name]] for name in names}


def test_what_every_tracker_promises() -> None:
    check_tracker(lambda folder: h.CSVLog(folder / "log.csv"), points)


def log(path: Path, *plugins: Any, steps: int = 4, **options: Any) -> h.RunResult:
    """Train from the beginning."""
    return kit.fit(
        h.LogSchedule(h.Every(steps=1)),
        h.CSVLog(path),
        *plugins,
        train=class_batches(steps),
        **{"epochs": 1, **options},
    )


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    with kit.kept_generators():
        yield
