"""Every request is told once, with its number, and is attached to what serves it."""

from __future__ import annotations

import pytest
from heliograph.builtin_callbacks.recorder.format.records import RepeatEntry, RequestEntry
from heliograph.builtin_callbacks.recorder.requests import KEPT, Asking
from heliograph.events import Control, Progress, Request


def asked(asking: Asking) -> list[tuple[int, str]]:
    return [(each.number, each.request.verb) for each in asking.news() if isinstance(each, RequestEntry)]


def test_requests_are_numbered_as_they_come() -> None:
    control = Control(Progress())
    asking = Asking(control.history)
    control.request_log("a")
    control.request_save("b")
    assert asked(asking) == [(0, "log"), (1, "save")]
    control.stop("c")
    assert asked(asking) == [(2, "stop")]
    assert asked(asking) == []
    assert asking.told == control.history.total == 3


def test_one_that_is_counted_up_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control(Progress())
    asking = Asking(control.history)
    monkeypatch.setattr("heliograph.events.control.is_within", lambda *names: True)
    for _ in range(3):
        control.hold_step("a")
    assert list(asking.news()) == [RequestEntry(0, Request("hold_step", "the caller", "a", 0, 0, 0, 3))]
    control.hold_step("a")
    assert list(asking.news()) == [RepeatEntry(0, 4)]
    assert list(asking.news()) == []


def test_an_event_serves_what_stands_and_no_more() -> None:
    control = Control(Progress())
    asking = Asking(control.history)
    for _ in range(2):
        control.request_validation("a")
    control.request_save("b")
    list(asking.news())
    assert asking.served_by("log") == []
    assert asking.served_by("validation_start") == [0, 1]
    assert asking.served_by("validation_start") == []
    assert asking.served_by("epoch_start") is None
    control.stop("c")
    list(asking.news())
    asking.turn_back()
    assert (asking.served_by("save_point"), asking.served_by("train_end")) == ([], [3])


def test_very_many_requests_and_long_ones_are_bounded() -> None:
    control = Control(Progress())
    asking = Asking(control.history)
    for _ in range(10_100):
        control.request_log("x" * 9_000)
    news = [each for each in asking.news() if isinstance(each, RequestEntry)]
    assert (news[0].number, news[-1].number, len(news[0].request.reason)) == (100, 10_099, 2_020)
    assert len(asking.served_by("log") or ()) == KEPT
