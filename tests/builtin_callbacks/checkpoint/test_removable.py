"""The ranking of checkpoints, for those that a run keeps and those that `prune` keeps."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Literal

import pytest
from heliograph.builtin_callbacks.checkpoint.removable import ranked
from heliograph.builtin_callbacks.checkpoint.retention import Retention
from heliograph.core.checkpoint.storage import Entry
from heliograph.core.checkpoint.storage.manifest import best_first, pointer_path
from heliograph.core.metrics.monitor import Monitor

LOSS = "validation/loss"


def entry(sequence: int, value: float | None, mode: str = "min", name: str | None = None) -> Entry:
    return Entry(Path(f"{name or sequence}.pth"), "run", sequence, 0.0, 0, "", judged_by=(LOSS, mode, value))


@pytest.mark.parametrize(
    ("mode", "values", "order"),
    [
        ("min", [3.0, 1.0, 2.0], [2, 3, 1]),
        ("max", [3.0, 1.0, 2.0], [1, 3, 2]),
        ("min", [1.0, 1.0, 0.0, 1.0], [3, 1, 2, 4]),
        ("max", [nan, 1.0, nan], [2, 1, 3]),
        ("min", [None, 2.0, None, 1.0], [4, 2]),
    ],
)
def test_the_run_and_the_command_line_rank_alike(
    mode: Literal["min", "max"], values: list[float | None], order: list[int]
) -> None:
    entries = [entry(number, value, mode) for number, value in enumerate(values, 1)]
    retention = Retention(None, 1, Monitor(LOSS, mode))
    retention.begin(entries)

    assert [each.sequence for each in ranked(entries[::-1], LOSS, mode)] == order
    assert retention.best == entries[order[0] - 1]


def test_the_order_in_which_they_are_given_does_not_matter() -> None:
    twins = [entry(2, 1.0, name="b"), entry(2, 1.0, name="a"), entry(1, 1.0, name="c")]

    for each in (twins, twins[::-1]):
        assert [found.path.stem for found in best_first(dict.fromkeys(each, 1.0), "min")] == ["c", "a", "b"]


def test_pointers_lie_beside_the_checkpoints() -> None:
    assert pointer_path(Path("folder"), "run", "best") == Path("folder/run.best")
    assert pointer_path(Path("folder"), "a run/1", "best") == Path("folder/a-run-1-495b8e4b.best")
