"""Encode and decode the lines of a recording: JSON arrays that begin with their kind (see also `checksum.py`).

    ["recording", 1]                                            the first line: the format
    ["attempt", {...}]                                          an attempt begins: the fields of `AttemptRecord`
    ["happened", event, clock, counters, data]                  `EventEntry`
    ["batches", number, part, counters, clock, rows, columns, losses]  `Batches`: a block, or a part of one
    ["behind", number, batch]                                   the next lines follow this batch of a later block
    ["asked", number, [...]]                                    `RequestEntry`: the fields of `Request`; target and
                                                                value only of a change of the run
    ["recounted", number, times]                                `RepeatEntry`
    ["spent", [[...], ...]]                                     `TimesEntry`: the fields of each `HandlerTime`
    ["digests", epoch, first, rows, columns, rates, chain, length]  `DigestBlock`
    ["lost", lines]                                             the number of lines that could not be written

Counters are a list of their values, in order. Tokens and their column are omitted if there are none. The JSON is
Python's, with NaN and Infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

import numpy as np
from heliograph import Progress
from heliograph.events import CHANGES, Request
from numpy.typing import NDArray

from . import columns
from .checksum import format_line
from .digests import DigestBlock, decode_digests, digest_items
from .forms import check_attempt, check_data, is_count, is_counters, is_request, is_text, is_time
from .records import (
    AttemptRecord,
    Batches,
    Counters,
    Entry,
    EventEntry,
    HandlerTime,
    RepeatEntry,
    RequestEntry,
    TimesEntry,
)

Items = tuple[Any, ...]
FORMAT = 1
ROWS = 4096  # at most, in a block
MAX_CHARACTERS = 200  # of a recorded text in an error
COLUMNS = ("centiseconds", "steps", "skipped_steps", "skipped_batches", "samples", "window")
_HEADER = tuple(field.name for field in fields(AttemptRecord) if field.name not in ("entries", "damage"))
_TUPLES = ("validation_sets", "optimizers")


def items_of(entry: Entry, number: int = 0) -> Items:
    match entry:
        case RequestEntry():
            return "asked", entry.number, _values(entry.request)
        case EventEntry():
            return event_items(entry.event, entry.clock, counter_values(entry.counters), entry.data)
        case RepeatEntry():
            return "recounted", entry.number, entry.times
        case TimesEntry():
            return "spent", [astuple(row) for row in entry.rows]
        case DigestBlock():
            return digest_items(entry)
        case Batches():
            values = [*(getattr(entry, name) for name in COLUMNS), entry.tokens or (0,) * len(entry)]
            return block_items((number, 0), entry.first, entry.clock, np.array(values, np.int64).T, entry.losses)


def event_items(event: str, clock: float, counters: Sequence[float], data: Mapping[str, Any]) -> Items:
    return "happened", event, round(clock, 6), counters, data


def mark_items(number: int, batch: int) -> Items:
    return "behind", number, batch


def block_items(
    number: tuple[int, int], first: Counters, clock: float, rows: NDArray[np.int64], losses: Sequence[float] | None
) -> Items:
    if not rows[-1, -1]:  # no tokens
        rows = rows[:, :-1]
    values = rows.T
    steps = np.empty(values.shape, np.int64)  # a column is contiguous here, which is four times as fast
    steps[:, 0] = values[:, 0] - _column_starts(first)[: len(values)]
    np.subtract(values[:, 1:], values[:, :-1], out=steps[:, 1:])
    ranges = zip(steps, steps.min(1).tolist(), steps.max(1).tolist(), strict=True)
    packed = [columns.pack(*column) for column in ranges]
    packed_losses = None if losses is None else columns.pack_floats(losses)
    return "batches", *number, counter_values(first), round(clock, 6), len(rows), packed, packed_losses


def counter_values(counters: Counters | Progress) -> tuple[float, ...]:
    return (
        counters.epoch, counters.batch, counters.earlier_batches, counters.steps, counters.skipped_steps,
        counters.skipped_batches, counters.samples, counters.validations, counters.evaluated, counters.seconds,
        *((counters.tokens,) if counters.tokens else ()),
    )  # fmt: skip


def encode_head() -> str:
    return format_line("recording", FORMAT)


def attempt_items(attempt: AttemptRecord) -> Items:
    return "attempt", {name: getattr(attempt, name) for name in _HEADER}


def encode_lost(lines: int) -> str:
    return format_line("lost", lines)


def decode_attempt(items: list[Any]) -> AttemptRecord:
    header: Any = items[1] if len(items) == 2 else None
    check_attempt(header)
    values: dict[str, Any] = {name: tuple(header[name]) if name in _TUPLES else header[name] for name in _HEADER}
    values["plan"] = {event: tuple(names) for event, names in header["plan"].items()}
    return AttemptRecord(**values, entries=())


def decode(items: list[Any]) -> Entry:
    kind, *values = items
    make, length = _DECODERS.get(kind, (None, 0))
    try:
        entry = make(*values) if make is not None and len(values) == length else None
    except (TypeError, AttributeError, KeyError, OverflowError) as error:
        raise ValueError(f"unreadable line {kind[:MAX_CHARACTERS]!r}: {str(error)[:MAX_CHARACTERS]}") from None
    if entry is None:
        raise ValueError(f"a line {kind[:MAX_CHARACTERS]!r} with unexpected values")
    return entry


def check_items(items: Any) -> None:
    match items:
        case ["behind", int(), int()]:
            return
        case [str(), *_]:
            decode(items)
        case _:
            raise ValueError("not an array that begins with a name")


def _values(request: Request) -> tuple[str | int | float | None, ...]:
    place = request.epoch, request.batch, request.step
    change = (request.target, request.value) if request.verb in CHANGES else ()
    extra = (*change, *filter(None, [request.through]))
    return request.verb, request.by, request.reason, *place, request.times, request.rank, request.event, *extra


def _column_starts(first: Counters) -> tuple[int, ...]:
    seconds, skips = round(first.seconds * 100), (first.skipped_steps, first.skipped_batches)
    return seconds, first.steps, *skips, first.samples, 0, first.tokens


def _counters(values: Any) -> Counters:
    if not is_counters(values):
        raise ValueError("invalid counters")
    return Counters(*values)


def _event(event: Any, clock: Any, counters: Any, data: Any) -> EventEntry | None:
    if not is_text(event) or not is_time(clock) or type(data) is not dict:
        return None
    check_data(event, data)
    return EventEntry(event, float(clock), _counters(counters), data)


def _request(number: Any, values: Any) -> RequestEntry | None:
    if not is_count(number) or not is_request(values):
        return None
    request, extra = Request(*values[:9]), values[9:]
    if request.verb in CHANGES:
        request.target, request.value, *extra = extra
    if extra:
        (request.through,) = extra
    return RequestEntry(number, request)


def _repeat(number: Any, times: Any) -> RepeatEntry | None:
    return RepeatEntry(number, times) if is_count(number) and is_count(times) else None


def _times(rows: Any) -> TimesEntry:
    return TimesEntry(tuple(_handler_time(*row) for row in rows))


def _handler_time(plugin: Any, event: Any, timed: Any, emissions: Any, seconds: Any, longest: Any) -> HandlerTime:
    texts, counts, times = (plugin, event), (timed, emissions), (seconds, longest)
    if not (all(map(is_text, texts)) and all(map(is_count, counts)) and all(map(is_time, times))):
        raise ValueError("invalid handler times")
    return HandlerTime(plugin, event, timed, emissions, float(seconds), float(longest))


def _batches(number: Any, part: Any, counters: Any, clock: Any, rows: Any, packed: Any, losses: Any) -> Batches | None:
    if not is_time(clock) or not all(map(is_count, (number, part, rows))) or not 0 < rows <= ROWS:
        return None
    first = _counters(counters)
    starts = _column_starts(first)[: max(len(packed), len(COLUMNS))]
    centiseconds, steps, skipped_steps, skipped_batches, samples, window, *optional = (
        columns.unpack(column, rows, start) for column, start in zip(packed, starts, strict=True)
    )
    tokens = optional[0] if optional else None
    numbers = None if losses is None else columns.unpack_floats(losses, rows)
    return Batches(
        first, float(clock), steps, skipped_steps, skipped_batches, samples, window, centiseconds, numbers, tokens
    )


_DECODERS: dict[str, tuple[Callable[..., Entry | None], int]] = {
    "happened": (_event, 4),
    "asked": (_request, 2),
    "recounted": (_repeat, 2),
    "spent": (_times, 1),
    "batches": (_batches, 7),
    "digests": (decode_digests, 7),
}
