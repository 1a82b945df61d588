"""The queue of a tracker: what is collected, flushed, refused and written again."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

from heliograph.builtin_callbacks.trackers.outbox import BATCH, Outbox
from heliograph.builtin_callbacks.trackers.records import Record


class Page:
    """Collects rows and writes images at once, with an outbox that waits until all records are in it."""

    def __init__(self, check: Callable[[list[Any]], Exception | None] = lambda names: None) -> None:
        self.written: list[Any] = []
        self._check, self._collected = check, dict[int, str]()
        self._begin = Event()
        self.outbox = Outbox("page", self._write, (OSError,), 100, 10.0, collects=("scalars",), flush=self._flush)

    def write(self, *records: Record) -> None:
        for record in (Record("open", ()), *records, Record("finish", ())):
            self.outbox.put(record)
        self._begin.set()
        self.outbox.close()

    def _write(self, record: Record) -> None:
        if record.kind == "open":
            self._begin.wait()
        elif record.kind == "scalars":
            self._collected[id(record)] = record.arguments[0]
        else:
            self.written.append(record.arguments[0] if record.kind == "image" else record.kind)

    def _flush(self) -> None:
        collected, self._collected = self._collected, {}
        names = list(collected.values())
        if (error := self._check(names)) is not None:
            if isinstance(error, OSError):
                self._collected = collected
            raise error
        self.written.append(names)


def row(name: str, metrics: int = 1) -> Record:
    return Record("scalars", (name, dict.fromkeys(range(metrics), 0.0)))


def image(name: str) -> Record:
    return Record("image", (name,))


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
    assert page.outbox.lost == {"scalars": 1}
    assert page.outbox.error == "ValueError: bad"


def test_after_an_outage_the_same_rows_are_written() -> None:
    outages = [OSError("away"), OSError("away")]
    page = Page(lambda names: outages.pop() if outages else None)
    page.write(row("a"), row("b"), image("i"))

    assert page.written == [["a", "b"], "i", "finish"]
    assert page.outbox.lost == {}
    assert page.outbox.error == ""
