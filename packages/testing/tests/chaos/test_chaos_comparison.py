"""What a journal says: the first difference, work that was lost, a notice that was ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from heliograph.core.objects.equality import leaves
from heliograph.core.trace import Fact
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph_testing.chaos import ChaosReport, Fault
from heliograph_testing.chaos.fault import FaultOutcome
from heliograph_testing.chaos.story import Journal, RankStory, first_difference
from heliograph_testing.resume.check import varying

END = "at the end of the run"
BEGIN = ("begin", dict[str, Any]())


def fact(what: str, when: str, value: Any) -> tuple[str, dict[str, Any]]:
    return "fact", {"fact": Fact(what, when, (0, 0, 0), leaves(value))}


def batch(number: int, *, window: int = 1) -> tuple[str, dict[str, Any]]:
    return "batch", {"batch": number, "ends_step": number % window == 0}


def loss(number: int, value: float = 0.5) -> tuple[str, dict[str, Any]]:
    return fact("loss", f"in batch {number}", value)


def saved(number: int) -> tuple[str, dict[str, Any]]:
    return "saved", {"batch": number}


def resumed(number: int) -> tuple[str, dict[str, Any]]:
    return "resumed", {"batch": number}


def end(number: int, status: str = "completed") -> tuple[str, dict[str, Any]]:
    facts = {"batch": number, "status": status, "counts": {"batch_end": number}}
    return "end", facts


def notice(number: int) -> tuple[str, dict[str, Any]]:
    return "fault", {"number": 0, "outcome": FaultOutcome(Fault("preempt"), "here", "", number)}


def of_second(entry: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return an entry of the second training of a script."""
    return entry[0], {**entry[1], "training": 1}


def written(path: Path, *entries: tuple[str, dict[str, Any]], weight: float = 1.0) -> RankStory:
    """Write a journal and read it."""
    journal = Journal(path)
    for what, facts in entries:
        journal.note(what, **{"training": 0, **facts})
        if what == "end":
            for part, value in (("modules", {"model": {"weight": weight}}), ("metrics", {"speed": weight})):
                journal.note("fact", training=0, **fact(part, END, value)[1])
    journal.close()
    return RankStory.read(path)


def test_equal_stories(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", BEGIN, batch(1), batch(2), end(2))
    other = written(tmp_path / "b.jsonl", BEGIN, batch(1), saved(1), BEGIN, resumed(1), batch(2), end(2))
    assert first_difference(one, other) is None
    assert (other.lost, other.resumed, other.done.total()) == ("", 1, 2)


def test_a_line_that_a_kill_has_cut_short_is_not_read(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", BEGIN, batch(1))
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("gASVMAAAAAAAAAB9lCiMBHdoYXSU")
    assert RankStory.read(tmp_path / "a.jsonl").done.total() == 1


def test_the_first_difference(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", BEGIN, loss(1), loss(2), end(2))
    wrong = written(tmp_path / "b.jsonl", BEGIN, loss(1), loss(2, 0.25), BEGIN, resumed(1), loss(2), end(2))
    assert_facts(first_difference(one, wrong), "the loss", "batch 2: 0.5", "0.25 in the other")
    assert first_difference(one, wrong, only_last=True) is None
    short = written(tmp_path / "c.jsonl", BEGIN, loss(1), end(1))
    for pair in ((one, short), (short, one)):
        assert "loss in batch 2" in (first_difference(*pair) or "")
    heavy = written(tmp_path / "d.jsonl", BEGIN, loss(1), loss(2), end(2), weight=2.0)
    weights = first_difference(one, heavy)
    assert_facts(weights, "model.weight", "end of the run", "1 in the reference", "2 in the other")
    assert varying(one.in_order, heavy.in_order) == {("metrics", "speed")}
    assert first_difference(one, heavy, frozenset({("modules", "model.weight"), ("metrics", "speed")})) is None


def log(number: int, **values: float) -> tuple[str, dict[str, Any]]:
    return fact("metrics", f"in the log after batch {number}", values)


def test_of_several_ends_the_last_counts(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", BEGIN, loss(1), loss(2), end(2))
    early = fact("modules", END, {"model": {"weight": 9.0}})
    assert first_difference(one, written(tmp_path / "b.jsonl", BEGIN, loss(1), early, BEGIN, loss(2), end(2))) is None


def test_a_metric_that_differs(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", BEGIN, loss(1), log(1, loss=0.5), log(1, mean=2.0), end(1))
    same = written(tmp_path / "b.jsonl", BEGIN, loss(1), log(1, mean=2.0), end(1))
    assert first_difference(one, same) is None
    other = written(tmp_path / "c.jsonl", BEGIN, loss(1), log(1, loss=0.25), log(1, mean=2.0), end(1))
    assert_facts(
        first_difference(one, other), "metrics (loss)", "after batch 1", "0.5 in the reference", "0.25 in the other"
    )
    assert varying(one.in_order, other.in_order) == {("metrics", "loss")}
    assert first_difference(one, other, frozenset({("metrics", "loss")})) is None


def test_work_that_was_lost(tmp_path: Path) -> None:
    older = written(tmp_path / "a.jsonl", BEGIN, saved(4), saved(8), BEGIN, resumed(4), batch(5))
    assert_facts(older.lost, "attempt 2", "batch 4", "batch 8")
    fresh = written(tmp_path / "b.jsonl", BEGIN, batch(1), saved(4), BEGIN, batch(1))
    assert_facts(fresh.lost, "attempt 2", "at batch 0", "batch 4", "resume='auto'")
    assert (fresh.resumed, fresh.restarted) == (0, 1)
    early = written(tmp_path / "e.jsonl", BEGIN, batch(1), BEGIN, batch(1))
    assert (early.lost, early.restarted) == ("", 1)
    announced = written(tmp_path / "d.jsonl", BEGIN, ("damaged", {"name": "run.pth"}))
    assert_facts(announced.lost, "attempt 1", "run.pth", "damaged")


@pytest.mark.parametrize(
    ("last", "window", "lost"),
    [(20, 1, "17"), (9, 1, ""), (20, 16, ""), (40, 2, "37")],
)
def test_a_notice_that_is_ignored(tmp_path: Path, last: int, window: int, lost: str) -> None:
    done = [batch(number, window=window) for number in range(4, last + 1)]
    found = written(tmp_path / "a.jsonl", BEGIN, batch(3), notice(3), *done, end(last)).lost
    assert lost in found
    assert bool(found) == bool(lost)


def test_a_notice_is_of_one_training(tmp_path: Path) -> None:
    after = [of_second(each) for each in (BEGIN, *map(batch, range(1, 31)), end(30))]
    next_one = written(tmp_path / "a.jsonl", BEGIN, notice(3), end(3), *after)
    assert next_one.lost == ""


def test_a_report_in_words() -> None:
    met = (
        FaultOutcome(Fault("kill"), "batch 1, in batch_end", "killed by SIGKILL"),
        FaultOutcome(Fault("bit-in-weight"), "batch 2, in step_end", "bit 3 differs"),
        FaultOutcome(Fault("slow", count=99)),
    )
    difference = "batch 3: 1.0"
    report = ChaosReport("differs", difference, 7, met, 4, 0, 1, 1, 20, 24, 2.0, 8.0)
    assert_each(
        str(report).splitlines(),
        ("2 faults acted", "seed 7", "1 did not"),
        ("kill at batch_end 1", "batch 1, in batch_end", "killed by SIGKILL"),
        ("bit-in-weight at step_end 1", "batch 2, in step_end", "bit 3", "not noticed"),
        ("slow at batch_end 99", "did not act"),
        ("4 attempts", "1 continued", "1 restarted", "ended 0"),
        ("goodput: 83%", "20 of 24", "4 were repeated", "25% of", "2.0 s of 8.0"),
        ("silent: 1 fault", "not noticed"),
        ("differs: batch 3: 1.0",),
    )
    assert not report.is_good
