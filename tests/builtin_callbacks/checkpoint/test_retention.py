"""Retention: the newest, the best and the pinned stay, everything else goes."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Literal

import pytest
from heliograph.builtin_callbacks.checkpoint.folder import Retention, ranked, reasons_to_keep
from heliograph.core.checkpoint.storage import Entry
from heliograph.core.checkpoint.storage.manifest import best_first
from heliograph.core.metrics.monitor import Monitor

LOSS = Monitor("validation/loss", "min")
ACCURACY = Monitor("validation/accuracy", "max")


def entry(sequence: int, value: float | None = None, monitor: Monitor = LOSS, name: str | None = None) -> Entry:
    judged_by = None if value is None else (monitor.name, monitor.mode, value)
    path = Path(name or f"{sequence}.pth")
    return Entry(path, "run", sequence, 0.0, 0, "", judged_by=judged_by, training="1" * 32)


def drop(retention: Retention, *pinned: int) -> list[int]:
    return [int(path.stem) for path in retention.drop(lambda path: int(path.stem) in pinned)]


def best(retention: Retention) -> str | None:
    return None if retention.best is None else retention.best.path.name


@pytest.mark.parametrize(("keep", "dropped"), [(1, [1, 2]), (2, [1]), (3, []), (9, []), (None, [])])
def test_the_newest_stay(keep: int | None, dropped: list[int]) -> None:
    retention = Retention(keep, 0, None)
    for sequence in (1, 2, 3):
        retention.add(entry(sequence))

    assert drop(retention) == dropped
    assert drop(retention) == []


@pytest.mark.parametrize(
    ("values", "keep_best", "first", "dropped"),
    [
        ([3.0, 1.0, 2.0, 4.0], 1, 2, [1, 3]),
        ([3.0, 1.0, 2.0, 4.0], 2, 2, [1]),
        ([1.0, 1.0, 1.0], 1, 1, [2]),
        ([nan, 2.0, 3.0], 1, 2, [1]),
        ([nan, nan, nan], 1, 1, [2]),
        ([None, 5.0, None, 9.0], 1, 2, [1, 3]),
    ],
)
def test_the_best_stay_besides(values: list[float | None], keep_best: int, first: int, dropped: list[int]) -> None:
    retention = Retention(1, keep_best, LOSS)
    for sequence, value in enumerate(values, 1):
        retention.add(entry(sequence, value))

    assert best(retention) == f"{first}.pth"
    assert drop(retention) == dropped


def test_larger_may_be_better() -> None:
    retention = Retention(1, 1, ACCURACY)
    retention.begin([entry(1, 0.5, ACCURACY), entry(2, 0.9, ACCURACY), entry(3, 0.7, ACCURACY)])

    assert best(retention) == "2.pth"
    assert drop(retention) == [1]


def test_another_metric_does_not_compete() -> None:
    retention = Retention(1, 2, LOSS)
    other_way = Monitor("validation/loss", "max")
    retention.begin([entry(1, 0.1, ACCURACY), entry(2, 0.2, other_way), entry(3, 0.9), entry(4)])

    assert best(retention) == "3.pth"
    assert drop(retention) == [1, 2]


def test_without_a_monitor_nothing_is_best() -> None:
    retention = Retention(1, 0, None)
    retention.begin([entry(1, 0.1), entry(2, 0.2)])

    assert best(retention) is None
    assert drop(retention) == [1]


def test_pinned_ones_stay_and_are_not_counted() -> None:
    retention = Retention(2, 0, None)
    retention.begin([entry(sequence) for sequence in range(1, 7)])

    assert drop(retention, 2, 6) == [1, 3]
    assert drop(retention, 6) == [2]


def test_a_pinned_one_can_be_the_best() -> None:
    retention = Retention(1, 1, LOSS)
    retention.begin([entry(1, 0.5), entry(2, 0.1), entry(3, 0.9)])

    assert drop(retention, 2) == [1]
    assert best(retention) == "2.pth"


def test_the_order_is_that_of_writing() -> None:
    retention = Retention(1, 0, None)
    retention.begin([entry(3), entry(1), entry(2)])

    assert drop(retention) == [1, 2]


def test_the_same_place_is_one_checkpoint() -> None:
    retention = Retention(1, 1, LOSS)
    retention.add(entry(1, 0.1, name="7.pth"))
    retention.add(entry(2, 0.5, name="7.pth"))

    assert retention.best is not None
    assert retention.best.judged_by == ("validation/loss", "min", 0.5)
    assert drop(retention) == []


def test_beginning_forgets() -> None:
    retention = Retention(1, 1, LOSS)
    retention.add(entry(1, 0.1))
    retention.begin([])

    assert best(retention) is None
    assert drop(retention) == []


def test_what_helios_wrote_competes_and_never_goes() -> None:
    """It may be of several trainings of one name."""
    retention = Retention(1, 1, LOSS)
    old = [entry(1, 0.1), entry(2, 0.5)]
    retention.begin([*(replace(each, versions={"helios": "1.1.0"}) for each in old), entry(3, 0.9), entry(4, 0.8)])

    assert best(retention) == "1.pth"
    assert drop(retention) == [3]


def test_damaged_ones_count_for_nothing_and_go_with_others() -> None:
    retention = Retention(2, 1, LOSS)
    retention.begin([entry(1, 0.5), entry(2, 0.4), entry(3, 0.3), entry(4, 0.1)], [Path("3.pth"), Path("4.pth")])
    retention.add(entry(5, 0.9))

    assert best(retention) == "2.pth"
    assert drop(retention) == [1, 3, 4]


def test_pins_are_looked_for_only_where_they_decide() -> None:
    """Each takes a look at the disk, and there may be thousands of checkpoints."""
    retention, asked = Retention(2, 50, LOSS), list[str]()
    retention.begin([entry(sequence, float(sequence)) for sequence in range(1, 101)])

    def is_pinned(path: Path) -> bool:
        asked.append(path.stem)
        return path.stem == "100"

    assert [path.stem for path in retention.drop(is_pinned)] == [str(number) for number in range(51, 98)]
    assert asked == [str(number) for number in range(100, 50, -1)]


def test_the_best_is_found_again_after_each_change() -> None:
    retention = Retention(1, 1, LOSS)
    found = []
    for sequence, value in enumerate((0.5, 0.1, 0.3), 1):
        retention.add(entry(sequence, value))
        found.append(best(retention))
    retention.add(entry(2, 0.9))
    found.append(best(retention))

    assert found == ["1.pth", "2.pth", "2.pth", "3.pth"]
    assert (drop(retention), best(retention)) == ([1], "3.pth")


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
def test_the_best_come_first(mode: Literal["min", "max"], values: list[float | None], order: list[int]) -> None:
    monitor = Monitor("validation/loss", mode)
    entries = [entry(number, value, monitor) for number, value in enumerate(values, 1)]
    retention = Retention(None, 1, monitor)
    retention.begin(entries)

    assert [entry.sequence for entry in ranked(entries[::-1], monitor)] == order
    assert retention.best == entries[order[0] - 1]


def test_the_order_in_which_they_are_given_does_not_matter() -> None:
    twins = [entry(2, 1.0, name="b.pth"), entry(2, 1.0, name="a.pth"), entry(1, 1.0, name="c.pth")]

    for entries in (twins, twins[::-1]):
        ranking = best_first(dict.fromkeys(entries, 1.0), "min")
        assert [entry.path.stem for entry in ranking] == ["c", "a", "b"]


def kept(damaged: set[int], count: int = 5, keep_last: int = 2, keep_best: int = 1) -> list[int]:
    """Return which of the checkpoints 1 to `count` are kept; the earlier, the better."""
    reasons = reasons_to_keep(
        [entry(sequence, float(sequence)) for sequence in range(count, 0, -1)],
        keep_last=keep_last,
        keep_best=keep_best,
        monitor=LOSS,
        is_pinned=lambda path: False,
        damage_to=lambda path: "cut short" * (int(path.stem) in damaged),
    )
    return sorted(int(path.stem) for path, reason in reasons.items() if reason)


@pytest.mark.parametrize(
    ("damaged", "expected"),
    [
        (set(), [1, 4, 5]),
        ({5}, [1, 3, 4, 5]),
        ({4}, [1, 3, 5]),
        ({1}, [2, 4, 5]),
        ({1, 4, 5}, [2, 3, 4, 5]),
        ({2, 3, 4, 5}, [1, 2, 3, 4, 5]),
        ({1, 2, 3, 4, 5}, [1, 2, 3, 4, 5]),
    ],
)
def test_nothing_goes_unless_an_intact_one_is_newer(damaged: set[int], expected: list[int]) -> None:
    assert kept(damaged) == expected


def test_only_what_would_be_kept_is_verified() -> None:
    verified = list[str]()

    def damage_to(path: Path) -> str:
        verified.append(path.stem)
        return ""

    entries = [entry(sequence, float(sequence)) for sequence in range(9, 0, -1)]
    options = {"keep_last": 2, "keep_best": 1, "monitor": LOSS}
    reasons_to_keep(entries, **options, is_pinned=lambda path: False, damage_to=damage_to)  # type: ignore[arg-type]

    assert verified == ["1", "9", "8"]
