"""The queue of a tracker: what is collected, flushed, refused and written again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from heliograph.builtin_callbacks.trackers import BATCH, Outbox, TrackerRecord
from heliograph.tests.messages import assert_each

Write = Callable[[list[TrackerRecord]], Any]


def make_outbox(write: Write, *, previous: Thread | None = None, **attributes: Any) -> Outbox:
    attributes = {"name": "page", "patience": 10.0, "settles": 0.0, "collects": (), **attributes}
    tracker: Any = SimpleNamespace(**attributes)
    return Outbox(tracker, write, previous)


class Page:
    """Collects rows and writes images at once, with an outbox that waits until all records are in it."""

    def __init__(self, check: Callable[[list[Any]], Exception | None] = lambda names: None) -> None:
        self.written: list[Any] = []
        self._check = check
        self._begin = Event()
        self.outbox = make_outbox(self._write, outages=(OSError,), capacity=100, collects=("scalars",))

    def write(self, *records: TrackerRecord) -> None:
        for record in (TrackerRecord("open", ()), *records, TrackerRecord("finish", ())):
            self.outbox.put(record)
        self._begin.set()
        self.outbox.close()

    def _write(self, records: list[TrackerRecord]) -> None:
        kind = records[0].kind
        if kind == "open":
            self._begin.wait()
        elif kind == "scalars":
            names = [record.arguments[0] for record in records]
            if (error := self._check(names)) is not None:
                raise error
            self.written.append(names)
        else:
            self.written.append(records[0].arguments[0] if kind == "image" else kind)


def row(name: str, metrics: int = 1) -> TrackerRecord:
    return TrackerRecord("scalars", (name, dict.fromkeys(range(metrics), 0.0)))


def image(name: str) -> TrackerRecord:
    return TrackerRecord("image", (name,))


def test_rows_are_written_together_before_what_is_not_collected() -> None:
    page = Page()
    page.write(row("a"), row("b"), image("i"), row("c"), row("d"))

    assert page.written == [["a", "b"], "i", ["c", "d"], "finish"]
    assert page.outbox.lost == {}


def test_no_more_values_go_together_than_there_is_room_for() -> None:
    page = Page()
    page.write(*(row(name, metrics=BATCH // 3) for name in "abcde"), row("f", metrics=2 * BATCH), row("g"))

    assert page.written == [["a", "b"], ["c", "d"], ["e"], ["f"], ["g"], "finish"]


def test_of_rows_that_are_refused_together_only_the_bad_one_is_lost_and_nothing_is_written_twice() -> None:
    page = Page(lambda names: ValueError("bad") if "c" in names else None)
    page.write(row("a"), image("i"), row("b"), row("c"), row("d"), image("j"), row("e"), row("f"))

    assert page.written == [["a"], "i", ["b"], ["d"], "j", ["e", "f"], "finish"]
    assert page.outbox.lost == {"ValueError: bad": {"scalars": 1}}


def test_after_an_outage_the_same_rows_are_written() -> None:
    outages = [OSError("away"), OSError("away")]
    page = Page(lambda names: outages.pop() if outages else None)
    page.write(row("a"), row("b"), image("i"))

    assert page.written == [["a", "b"], "i", "finish"]
    assert page.outbox.lost == {}


def test_each_loss_has_its_own_reason() -> None:
    """A refusal at the beginning does not stand for the outage at the end, nor for what found no room."""
    is_away = Event()

    def write(records: list[TrackerRecord]) -> None:
        record = records[0]
        if record.kind == "open":
            is_away.wait()
        elif record.arguments == ("bad",):
            raise ValueError("a bad name")
        elif record.kind != "text":
            raise OSError("no route")

    outbox = make_outbox(write, outages=(OSError,), capacity=5, patience=0.05)
    for record in (
        TrackerRecord("open", ()),
        TrackerRecord("text", ("bad",)),
        row("a"),
        row("b"),
        image("i"),
        image("j"),
    ):
        outbox.put(record)
    outbox.put(TrackerRecord("finish", ()))
    is_away.set()
    outbox.close()

    assert_each(outbox.lost, ("5 records", "256 MB"), ["ValueError: a bad name"], ["OSError: no route"])
    assert list(outbox.lost.values()) == [{"image": 1}, {"text": 1}, {"scalars": 2, "image": 1, "finish": 1}]


def test_the_next_run_waits_for_a_request_of_the_former() -> None:
    answers, order = Event(), list[str]()

    def write_late(records: list[TrackerRecord]) -> str:
        answers.wait()
        order.append("former")
        return "late"

    former = make_outbox(write_late, outages=(), capacity=5, patience=0.05)
    former.put(TrackerRecord("open", ()))
    thread = former.close()
    assert thread is not None
    assert_each(former.lost, ["0.05 seconds"])
    assert list(former.lost.values()) == [{"open": 1}]

    def write(records: list[TrackerRecord]) -> str:
        record = records[0]
        order.append(record.kind)
        return "page"

    outbox = make_outbox(write, outages=(), capacity=5, patience=60.0, previous=thread)
    outbox.put(TrackerRecord("open", ()))
    answers.set()
    assert outbox.close() is None
    assert order == ["former", "open"]
    assert (outbox.opened, outbox.lost) == ("page", {})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_loses_what_comes_and_says_why() -> None:
    def write(records: list[TrackerRecord]) -> None:
        raise KeyboardInterrupt("in the thread")

    outbox = make_outbox(write, outages=(), capacity=5, patience=60.0)
    outbox.put(TrackerRecord("open", ()))
    outbox.drain()
    outbox.put(row("a"))
    assert outbox.close() is None
    assert outbox.lost == {"KeyboardInterrupt: in the thread": {"open": 1, "scalars": 1}}


def test_a_handler_of_logging_may_log_to_the_page(caplog: pytest.LogCaptureFixture) -> None:
    """The thread says that an outage is over without the lock that the handler's record waits for."""
    outages = [OSError("away")]

    def write(records: list[TrackerRecord]) -> None:
        record = records[0]
        if record.kind == "scalars" and outages:
            raise outages.pop()

    outbox = make_outbox(write, outages=(OSError,), capacity=5, patience=60.0)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            thread = Thread(target=outbox.put, args=(TrackerRecord("text", (record.getMessage(),)),))
            thread.start()
            thread.join(20)
            assert not thread.is_alive(), "the queue is locked"
            said.append(record.getMessage())

    said = list[str]()
    handler, logger = Handler(), logging.getLogger("heliograph")
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "heliograph"):
            outbox.put(row("a"))
            outbox.close()
    finally:
        logger.removeHandler(handler)
    assert_each([text.split(":")[0] for text in said], ("page", "cannot be written"), ("page", "written again"))
