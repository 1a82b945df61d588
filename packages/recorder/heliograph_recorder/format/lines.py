"""Encode and decode the lines of a recording.

A line is a JSON array that begins with its kind, a tab, and the CRC-32 of the array's text in hexadecimal digits. The
checksum detects lines that are cut short or have a wrong digit.

    ["recording", 1]                                            the first line: the format
    ["attempt", {...}]                                          an attempt begins: the fields of `AttemptRecord`
    ["happened", event, clock, counters, data]                  `EventEntry`
    ["batches", counters, clock, rows, columns, losses]         `Batches`
    ["asked", number, [...]]                                    `RequestEntry`: the fields of `Request`; target and
                                                                value only of a change of the run
    ["recounted", number, times]                                `RepeatEntry`
    ["spent", [[...], ...]]                                     `TimesEntry`: the fields of each `HandlerTime`
    ["digests", epoch, first, rows, columns, rates]  `DigestBlock`

Counters are a list of their values, in order; so are requests, handler times and attempts. A column of equal numbers is
one number. The JSON is Python's, with NaN and Infinity.
"""

from __future__ import annotations

import binascii
import json
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from json.encoder import JSONEncoder, encode_basestring_ascii
from operator import attrgetter
from typing import Any
from zlib import crc32

import numpy as np
from heliograph import Progress
from heliograph.events import Request
from numpy.typing import NDArray

from .records import (
    COLUMNS,
    DIGESTS,
    AttemptRecord,
    Batches,
    Counters,
    DigestBlock,
    Entry,
    EventEntry,
    HandlerTime,
    RepeatEntry,
    RequestEntry,
    TimesEntry,
)

Items = tuple[Any, ...]
FORMAT = 2
ROWS = 4096  # at most, in a block
MAX_CHARACTERS = 200  # of a recorded text in an error
Packed = int | float | list[str]
NARROWER = {"i": ("<i1", "<i2", "<i4"), "f": ("<f4",), "u": ()}  # types that may hold all values of a column
MIN_COMPRESSED = 256  # bytes; compressing less takes longer than the encoding
_HEADER = tuple(field.name for field in fields(AttemptRecord) if field.name not in ("entries", "damage", "has_gap"))
_TUPLES = ("validation_sets", "optimizers")
_REQUEST = attrgetter(*(field.name for field in fields(Request)))
counter_values: Callable[[Counters | Progress], tuple[Any, ...]] = attrgetter(
    *(field.name for field in fields(Counters))
)
_decode_json = json.JSONDecoder().raw_decode
# JSONEncoder.encode makes this object for each call, which takes as long as encoding a line.
_encode_pieces = json.encoder.c_make_encoder(  # type: ignore[attr-defined]  # torch runs on CPython only, which has it
    None, JSONEncoder().default, encode_basestring_ascii, None, ":", ",", False, False, True
)


def format_line(*items: Any) -> str:
    text = "".join(_encode_pieces(items, 0))
    return f"{text}\t{crc32(text.encode()):08x}"


def parse_line(line: str | bytes) -> list[Any]:
    text, tab, checksum = (line.encode() if isinstance(line, str) else line).rpartition(b"\t")
    if not tab or checksum != b"%08x" % crc32(text):
        raise ValueError("damaged")
    return parse_array(text)


def parse_array(text: bytes) -> list[Any]:
    decoded = text.decode()
    items, end = _decode_json(decoded)
    if end != len(decoded) or not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise ValueError("not an array that begins with a name")
    return items


def pack(values: NDArray[Any]) -> Packed:
    """Encode a column: one number if all are equal, else the bytes of the smallest type that holds all of them."""
    data = values.tobytes()
    if data == data[: values.itemsize] * len(values):
        number: int | float = values[0].item()
        return number
    with np.errstate(over="ignore"):
        for kind in NARROWER[values.dtype.kind]:
            narrow = values.astype(kind)
            if narrow.astype(values.dtype).tobytes() == data:
                values, data = narrow, narrow.tobytes()
                break
    name = f"<{values.dtype.kind}{values.itemsize}"
    if len(data) >= MIN_COMPRESSED:
        name, data = "z" + name, zlib.compress(data, 1)
    return [name, binascii.b2a_base64(data, newline=False).decode()]


def unpack(packed: Packed, rows: int) -> NDArray[Any]:
    if isinstance(packed, int | float):
        return np.full(rows, packed)
    kind, text = packed
    data = binascii.a2b_base64(text)
    values = np.frombuffer(zlib.decompress(data) if kind.startswith("z") else data, kind.removeprefix("z"))
    if len(values) != rows:
        raise ValueError(f"a column with {len(values)} values instead of {rows}")
    return values


def _array(kind: str, values: NDArray[Any]) -> Sequence[Any]:
    return array(kind, values.astype(kind).tobytes())


def _counted(packed: Packed, rows: int, first: int) -> Sequence[int]:
    """Return a column of counters, given its differences from one to the next, the first from `first`."""
    if isinstance(packed, int):
        return range(first + packed, first + packed * (rows + 1), packed) if packed else (first,) * rows
    return _array("q", np.cumsum(unpack(packed, rows), dtype=np.int64) + first)


def items_of(entry: Entry) -> Items:
    match entry:
        case RequestEntry():
            return "asked", entry.number, _REQUEST(entry.request)
        case EventEntry():
            return event_items(entry.event, entry.clock, counter_values(entry.counters), entry.data)
        case RepeatEntry():
            return "recounted", entry.number, entry.times
        case TimesEntry():
            return "spent", [astuple(row) for row in entry.rows]
        case DigestBlock():
            columns = {name: pack(np.asarray(entry.columns[name], "<u4")) for name in DIGESTS}
            rates = pack(np.asarray(entry.rates, "<f8"))
            return "digests", entry.epoch, entry.first, len(entry), columns, rates
        case Batches():
            values = np.array([getattr(entry, name) for name in COLUMNS], np.int64).T
            return block_items(entry.first, entry.clock, values, entry.losses)


def event_items(event: str, clock: float, counters: Sequence[float], data: Mapping[str, Any]) -> Items:
    return "happened", event, round(clock, 6), counters, data


def block_items(first: Counters, clock: float, rows: NDArray[np.int64], losses: Sequence[float] | None) -> Items:
    values = rows.T
    steps = np.empty(values.shape, np.int64)  # a column is contiguous here, which is four times as fast
    steps[:, 0] = values[:, 0] - _column_starts(first)
    np.subtract(values[:, 1:], values[:, :-1], out=steps[:, 1:])
    packed_losses = None if losses is None else pack(np.asarray(losses, "<f8"))
    return "batches", counter_values(first), round(clock, 6), len(rows), [*map(pack, steps)], packed_losses


def encode_head() -> str:
    return format_line("recording", FORMAT)


def attempt_items(attempt: AttemptRecord) -> Items:
    return "attempt", {name: getattr(attempt, name) for name in _HEADER}


def decode_attempt(items: list[Any]) -> AttemptRecord:
    _, header = items
    values: dict[str, Any] = {name: tuple(header[name]) if name in _TUPLES else header[name] for name in _HEADER}
    values["plan"] = {event: tuple(names) for event, names in header["plan"].items()}
    return AttemptRecord(**values, entries=())


def decode(items: list[Any]) -> Entry:
    kind, *values = items
    try:
        return _DECODERS[kind](*values)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"unreadable line {kind[:MAX_CHARACTERS]!r}: {str(error)[:MAX_CHARACTERS]}") from None


def _column_starts(first: Counters) -> tuple[int, ...]:
    skips = first.skipped_steps, first.skipped_batches
    return round(first.seconds * 100), first.steps, *skips, first.samples, 0, first.tokens


def _digests(epoch: int, first: int, rows: int, packed: Any, rates: Any) -> DigestBlock:
    words = {name: _array("I", unpack(packed[name], rows)) for name in DIGESTS}
    return DigestBlock(epoch, first, words, _array("d", unpack(rates, rows)))


def _event(event: str, clock: float, counters: list[Any], data: dict[str, Any]) -> EventEntry:
    return EventEntry(event, float(clock), Counters(*counters), data)


def _request(number: int, values: list[Any]) -> RequestEntry:
    return RequestEntry(number, Request(*values))


def _times(rows: list[list[Any]]) -> TimesEntry:
    return TimesEntry(tuple(HandlerTime(*row) for row in rows))


def _batches(counters: list[Any], clock: float, rows: int, packed: Any, losses: Any) -> Batches:
    first = Counters(*counters)
    columns = map(_counted, packed, [rows] * len(COLUMNS), _column_starts(first))
    numbers = None if losses is None else _array("d", unpack(losses, rows))
    return Batches(first, float(clock), **dict(zip(COLUMNS, columns, strict=True)), losses=numbers)


_DECODERS: dict[str, Callable[..., Entry]] = {
    "happened": _event,
    "asked": _request,
    "recounted": RepeatEntry,
    "spent": _times,
    "batches": _batches,
    "digests": _digests,
}
