"""Every request is an entry once, with its number, and belongs to the event that serves it."""

from __future__ import annotations

import pytest
from heliograph.events import Control, Progress, Request
from heliograph_recorder.attempt_recorder import MAX_SERVED, RequestTracker
from heliograph_recorder.format.records import RepeatEntry, RequestEntry


def asked(tracker: RequestTracker) -> list[tuple[int, str]]:
    return [(each.number, each.request.verb) for each in tracker.new_entries() if isinstance(each, RequestEntry)]


def test_requests_are_numbered_in_order() -> None:
    control = Control(Progress())
    tracker = RequestTracker(control.history)
    control.request_log("a")
    control.request_save("b")
    assert asked(tracker) == [(0, "log"), (1, "save")]
    control.stop("c")
    assert asked(tracker) == [(2, "stop")]
    assert asked(tracker) == []
    assert tracker.seen == control.history.total == 3


def test_a_repeated_request_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control(Progress())
    tracker = RequestTracker(control.history)
    monkeypatch.setattr("heliograph.events.control.is_within", lambda *names: True)
    for _ in range(3):
        control.hold_step("a")
    assert list(tracker.new_entries()) == [RequestEntry(0, Request("hold_step", "the caller", "a", 0, 0, 0, 3))]
    control.hold_step("a")
    assert list(tracker.new_entries()) == [RepeatEntry(0, 4)]
    assert list(tracker.new_entries()) == []


def test_an_event_serves_the_pending_requests() -> None:
    control = Control(Progress())
    tracker = RequestTracker(control.history)
    for _ in range(2):
        control.request_validation("a")
    control.request_save("b")
    list(tracker.new_entries())
    assert tracker.pop_served("log", {}) == []
    assert tracker.pop_served("validation_start", {}) == [0, 1]
    assert tracker.pop_served("validation_start", {}) == []
    assert tracker.pop_served("epoch_start", {}) is None
    control.stop("c")
    list(tracker.new_entries())
    tracker.drop_pending()
    assert (tracker.pop_served("save_point", {}), tracker.pop_served("train_end", {})) == ([], [3])


def test_many_and_long_requests_are_limited() -> None:
    control = Control(Progress())
    tracker = RequestTracker(control.history)
    for _ in range(10_100):
        control.request_log("x" * 9_000)
    news = [each for each in tracker.new_entries() if isinstance(each, RequestEntry)]
    assert (news[0].number, news[-1].number, len(news[0].request.reason)) == (100, 10_099, 2_020)
    assert len(tracker.pop_served("log", {}) or ()) == MAX_SERVED
