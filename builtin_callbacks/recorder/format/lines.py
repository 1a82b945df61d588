"""The lines of a recording: a JSON array each, whose first item says what it is, and its checksum (see `sealing.py`).

    ["recording", 1]                                            the first line: the format
    ["attempt", {...}]                                          an attempt begins: the fields of `Attempt`
    ["happened", event, clock, place, data]
    ["batches", number, part, place, clock, rows, columns, losses]    a block, numbered so that none counts twice
    ["behind", number, batch]                                   what follows came behind this batch of a block to come
    ["asked", number, [...]]                                    the fields of `Request`
    ["recounted", number, times]
    ["spent", [[...], ...]]                                     the fields of each `HandlerTime`
    ["lost", lines]                                             so many that could not be written, here

A place is its numbers in the order of `Counters`. JSON is written as Python does it: NaN and Infinity are bare words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....events import Request
from . import columns
from .checksum import sealed
from .forms import check_attempt, check_data, is_count, is_place, is_request, is_text, is_time
from .records import Attempt, Batches, Counters, Entry, EventEntry, HandlerTime, RepeatEntry, RequestEntry, TimesEntry

FORMAT = 1
ROWS = 4096  # of a block: a damaged number must not fill the memory
LONGEST = 200  # characters of a foreign text in a sentence
COLUMNS = ("centiseconds", "steps", "skipped_steps", "skipped_batches", "samples", "window")
_ABOUT = tuple(each.name for each in fields(Attempt) if each.name not in ("entries", "damage"))
_TUPLES = ("validation_sets", "optimizers")


def encode(entry: Entry, number: int = 0) -> str:
    """Return an entry's line, without its end; a block of batches has a number."""
    match entry:
        case EventEntry():
            return sealed("happened", entry.event, round(entry.clock, 6), tuple_of(entry.counters), entry.data)
        case RequestEntry():
            return sealed("asked", entry.number, _values(entry.request))
        case RepeatEntry():
            return sealed("recounted", entry.number, entry.times)
        case TimesEntry():
            return sealed("spent", [astuple(row) for row in entry.rows])
        case Batches():
            values = [getattr(entry, name) for name in COLUMNS]
            return encode_rows((number, 0), entry.first, entry.clock, np.array(values, np.int64).T, entry.losses)


def encode_rows(
    number: tuple[int, int], first: Counters, clock: float, rows: NDArray[np.int64], losses: Sequence[float] | None
) -> str:
    """Return the line of a block of batches.

    Args:
        number: the block's, within the attempt, and the part's.
        first: the place before the first batch.
        clock: seconds since the attempt began, behind the last.
        rows: (batches, 6), the columns in the order of `COLUMNS`.
        losses: of each.
    """
    steps = rows.copy()
    steps[0] -= _starts(first)
    steps[1:] -= rows[:-1]
    ranges = zip(steps.T, steps.min(0).tolist(), steps.max(0).tolist(), strict=True)
    packed = [columns.pack(*each) for each in ranges]
    known = None if losses is None else columns.pack_floats(losses)
    return sealed("batches", *number, tuple_of(first), round(clock, 6), len(rows), packed, known)


def tuple_of(counters: Counters) -> tuple[float, ...]:
    """Return the counters in the order of their fields."""
    return (
        counters.epoch, counters.batch, counters.earlier_batches, counters.steps, counters.skipped_steps,
        counters.skipped_batches, counters.samples, counters.validations, counters.evaluated, counters.seconds,
    )  # fmt: skip


def encode_head() -> str:
    """Return the first line."""
    return sealed("recording", FORMAT)


def encode_attempt(attempt: Attempt) -> str:
    """Return the line that begins an attempt."""
    return sealed("attempt", {name: getattr(attempt, name) for name in _ABOUT})


def encode_mark(number: int, batch: int) -> str:
    """Return the line that tells behind which batch of a block, which is still open, the next lines belong."""
    return sealed("behind", number, batch)


def encode_lost(lines: int) -> str:
    """Return the line that tells of others that could not be written."""
    return sealed("lost", lines)


def decode_attempt(items: list[Any]) -> Attempt:
    """Return an attempt that has no entries yet.

    Raises:
        ValueError: something is missing or wrong.
    """
    about: Any = items[1] if len(items) == 2 else None
    check_attempt(about)
    values: dict[str, Any] = {name: tuple(about[name]) if name in _TUPLES else about[name] for name in _ABOUT}
    values["plan"] = {event: tuple(names) for event, names in about["plan"].items()}
    return Attempt(**values, entries=())


def decode(items: list[Any]) -> Entry:
    """Return the entry of a line's array.

    Raises:
        ValueError: it is none, or something in it is wrong.
    """
    kind, *values = items
    make, length = _DECODERS.get(kind, (None, 0))
    try:
        entry = make(*values) if make is not None and len(values) == length else None
    except (TypeError, AttributeError, KeyError, OverflowError) as error:
        raise ValueError(f"a line {kind[:LONGEST]!r} that cannot be read: {str(error)[:LONGEST]}") from None
    if entry is None:
        raise ValueError(f"a line {kind[:LONGEST]!r} of another form")
    return entry


def _values(request: Request) -> tuple[str | int | None, ...]:
    where = request.epoch, request.batch, request.step
    return request.verb, request.by, request.reason, *where, request.times, request.rank, request.event


def _starts(first: Counters) -> tuple[int, ...]:
    """Return the value before a block's first row, by column."""
    begun = round(first.seconds * 100)
    return begun, first.steps, first.skipped_steps, first.skipped_batches, first.samples, 0


def _place(values: Any) -> Counters:
    if not is_place(values):
        raise ValueError("a place of other than numbers")
    return Counters(*values)


def _happened(event: Any, clock: Any, place: Any, data: Any) -> EventEntry | None:
    if not is_text(event) or not is_time(clock) or type(data) is not dict:
        return None
    check_data(event, data)
    return EventEntry(event, float(clock), _place(place), data)


def _asked(number: Any, values: Any) -> RequestEntry | None:
    if not is_count(number) or not is_request(values):
        return None
    return RequestEntry(number, Request(*values))


def _recounted(number: Any, times: Any) -> RepeatEntry | None:
    return RepeatEntry(number, times) if is_count(number) and is_count(times) else None


def _spent(rows: Any) -> TimesEntry:
    return TimesEntry(tuple(_spending(*row) for row in rows))


def _spending(plugin: Any, event: Any, timed: Any, emissions: Any, seconds: Any, longest: Any) -> HandlerTime:
    texts, counts, times = (plugin, event), (timed, emissions), (seconds, longest)
    if not (all(map(is_text, texts)) and all(map(is_count, counts)) and all(map(is_time, times))):
        raise ValueError("a spending of another form")
    return HandlerTime(plugin, event, timed, emissions, float(seconds), float(longest))


def _batches(number: Any, part: Any, place: Any, clock: Any, rows: Any, packed: Any, losses: Any) -> Batches | None:
    if not is_time(clock) or not all(map(is_count, (number, part, rows))) or not 0 < rows <= ROWS:
        return None
    first = _place(place)
    pairs = zip(packed, _starts(first), strict=True)
    centiseconds, steps, skipped_steps, skipped_batches, samples, window = (
        columns.unpack(column, rows, start) for column, start in pairs
    )
    known = None if losses is None else columns.unpack_floats(losses, rows)
    return Batches(first, float(clock), steps, skipped_steps, skipped_batches, samples, window, centiseconds, known)


_DECODERS: dict[str, tuple[Callable[..., Entry | None], int]] = {
    "happened": (_happened, 4),
    "asked": (_asked, 2),
    "recounted": (_recounted, 2),
    "spent": (_spent, 1),
    "batches": (_batches, 7),
}
