"""What a run was doing, and when."""

from __future__ import annotations

from itertools import pairwise

import pytest
from heliograph.packages.recorder.tests.explain.factory import Script, killed_and_resumed, recording
from heliograph_recorder.explain.attempt_summary import summarize_attempts
from heliograph_recorder.explain.efficiency import Slice, longest, phases, totals
from heliograph_recorder.timeline.curves import Axis


def kinds(script: Script) -> list[tuple[str, float]]:
    (attempt,) = summarize_attempts(recording(script))
    return [(piece.kind, round(piece.seconds, 6)) for piece in phases(attempt)]


def test_a_run_trains_validates_and_saves() -> None:
    script = Script()
    script.emit("train_start")
    script.emit("checkpoint_loaded", 0.3, path=None, origin={})
    script.emit("replay", 0.1, done=0, batches=4)
    script.emit("replay", 0.4, done=4, batches=4)
    script.emit("epoch_start", 0.1, epoch=0, resumed=True, batches=8)
    script.batches(4)
    script.log(train__loss=1.0)
    script.validation(validation__loss=1.0)
    script.save("a.pth")
    script.batches(2)
    assert kinds(script) == [
        ("starting", 0.4),
        ("replaying", 0.4),
        ("training", 2.1),
        ("validation", 0.4),
        ("saving", 0.2),
        ("training", 1.0),
    ]


def test_a_background_save_is_no_phase() -> None:
    script = Script()
    script.start()
    script.batches(1)
    script.emit("save_point", asked=[])
    script.batches(2)
    script.emit("checkpoint_saved", 0.1, path="a.pth", is_best=False)
    script.batches(1)
    assert kinds(script) == [("starting", 0.1), ("training", 2.1)]


def test_a_validation_that_was_cut() -> None:
    script = Script()
    script.start()
    script.emit("validation_start", asked=[], batches=3)
    script.emit("validation_cut", 0.7, reason="SIGTERM")
    script.batches(1)
    assert kinds(script) == [("starting", 0.1), ("validation", 0.7), ("training", 0.5)]


def test_a_test_without_a_training() -> None:
    script = Script(phase="test")
    script.emit("test_start", 0.2, batches=3)
    script.emit("test_end", 0.7, metrics={}, batches=[])
    script.close("completed", "3 batches evaluated")
    assert kinds(script) == [("starting", 0.2), ("test", 0.7)]


def test_phases_leave_no_gap() -> None:
    for attempt in summarize_attempts(killed_and_resumed()):
        found = phases(attempt)
        assert (found[0].begin, found[-1].end) == (0.0, attempt.seconds)
        assert all(one.end == other.begin and one.kind != other.kind for one, other in pairwise(found))
        assert sum(totals(found).values()) == pytest.approx(attempt.seconds)


def test_of_thousands_of_phases_the_longest_are_kept() -> None:
    found = [
        Slice("training" if number % 2 else "validation", 1, number, number + (0.9 if number % 2 else 0.1), number)
        for number in range(10_000)
    ]
    kept = longest(found)
    assert len(kept) <= 1_500
    assert {piece.kind for piece in kept} == {"training"}
    assert all(one.end <= other.begin for one, other in pairwise(kept))
    assert longest(found[:100]) == found[:100]


def test_attempts_are_end_to_end_with_a_narrow_gap() -> None:
    found = summarize_attempts(killed_and_resumed())  # the second begins two hours later
    axis = Axis(found)
    assert axis.gap == pytest.approx(0.015 * 13.6)
    assert axis.at(1, 1.0) == 1.0
    assert axis.at(2, 1.0) == pytest.approx(6.3 + axis.gap + 1.0)
    assert axis.end == pytest.approx(13.6 + axis.gap)
    assert Axis(found[:1]).gap == 0.0
