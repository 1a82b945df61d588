"""Encode and decode the lines of a recording.

A line is a JSON array that begins with its kind, a tab, and the CRC-32 of the array's text in hexadecimal digits. The
checksum detects lines that are cut short or have a wrong digit.

    ["recording", 1]                                            the first line: the format
    ["attempt", {...}]                                          an attempt begins: the fields of `AttemptRecord`
    ["happened", event, clock, counters, data]                  `EventEntry`
    ["batches", number, part, counters, clock, rows, columns, losses]  `Batches`: a block, or a part of one
    ["asked", number, [...]]                                    `RequestEntry`: the fields of `Request`; target and
                                                                value only of a change of the run
    ["recounted", number, times]                                `RepeatEntry`
    ["spent", [[...], ...]]                                     `TimesEntry`: the fields of each `HandlerTime`
    ["digests", epoch, first, rows, columns, rates, chain, length]  `DigestBlock`

Counters are a list of their values, in order. Tokens and their column are omitted if there are none. The JSON is
Python's, with NaN and Infinity.
"""

from __future__ import annotations

import binascii
import json
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from json.encoder import JSONEncoder, encode_basestring_ascii
from typing import Any
from zlib import crc32

import numpy as np
from heliograph import Progress
from heliograph.events import CHANGES, Request
from numpy.typing import NDArray

from .records import (
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
FORMAT = 1
ROWS = 4096  # at most, in a block
MAX_CHARACTERS = 200  # of a recorded text in an error
Packed = int | list[str]
WIDTHS = ("<i1", "<i2", "<i4", "<i8")
MIN_COMPRESSED = 256  # bytes; compressing less takes longer than the encoding
COLUMNS = ("centiseconds", "steps", "skipped_steps", "skipped_batches", "samples", "window")
_HEADER = tuple(field.name for field in fields(AttemptRecord) if field.name not in ("entries", "damage"))
_TUPLES = ("validation_sets", "optimizers")
_encoder = JSONEncoder()
_decode_json = json.JSONDecoder().raw_decode
# JSONEncoder.encode makes this object for each call, which takes as long as encoding a line.
_encode_pieces = json.encoder.c_make_encoder(  # type: ignore[attr-defined]  # torch runs on CPython only, which has it
    None, _encoder.default, encode_basestring_ascii, None, ":", ",", False, False, True
)


def format_line(*items: Any) -> str:
    return seal(to_json(items))


def seal(text: str) -> str:
    return f"{text}\t{crc32(text.encode()):08x}"


def to_json(items: Sequence[Any]) -> str:
    return "".join(_encode_pieces(items, 0))


def parse_line(line: str | bytes) -> list[Any]:
    text = _verified_text(line.encode() if isinstance(line, str) else line)
    if text is None:
        raise ValueError("damaged")
    return parse_array(text)


def is_intact(line: bytes) -> bool:
    return _verified_text(line) is not None


def parse_array(text: bytes) -> list[Any]:
    decoded = text.decode()
    items, end = _decode_json(decoded)
    if end != len(decoded) or not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise ValueError("not an array that begins with a name")
    return items


def _verified_text(line: bytes) -> bytes | None:
    text, tab, checksum = line.rpartition(b"\t")
    return text if tab and checksum == b"%08x" % crc32(text) else None


def pack(steps: NDArray[np.int64], least: int, most: int) -> Packed:
    """Encode the differences between integers: one number if all are equal, else the smallest type, compressed.

    The first difference is the one from a number that the reader knows.
    """
    if least == most:
        return least
    if least >= -0x80 and most < 0x80:
        return _encode(steps.astype("<i1"))
    width = next(width for width in WIDTHS if np.iinfo(width).min <= least and most <= np.iinfo(width).max)
    return _encode(steps.astype(width))


def unpack(packed: Packed, rows: int, first: int) -> Sequence[int]:
    if isinstance(packed, int):
        return range(first + packed, first + packed * (rows + 1), packed) if packed else (first,) * rows
    steps = _decode(packed, rows)
    return array("q", (np.cumsum(steps, dtype=np.int64) + first).tobytes())


def pack_floats(values: Sequence[float]) -> list[str]:
    """Encode numbers as float32 if that is exact for all of them, NaN included, else as float64."""
    wide = np.asarray(values, "<f8")
    with np.errstate(over="ignore"):
        narrow = wide.astype("<f4")
    exact = narrow.astype("<f8").tobytes() == wide.tobytes()
    return _encode(narrow if exact else wide)


def unpack_floats(packed: list[str], rows: int) -> Sequence[float]:
    return array("d", _decode(packed, rows).astype(np.float64).tobytes())


def pack_words(words: Sequence[int]) -> Packed:
    numbers = np.asarray(words, "<u4")
    return int(numbers[0]) if (numbers == numbers[0]).all() else _encode(numbers)


def unpack_words(packed: Packed, rows: int) -> Sequence[int]:
    if isinstance(packed, int):
        return array("I", [packed]) * rows
    return array("I", _decode(packed, rows).astype(np.uint32).tobytes())


def _encode(values: NDArray[Any]) -> list[str]:
    data, kind = values.tobytes(), f"<{values.dtype.kind}{values.itemsize}"
    if len(data) < MIN_COMPRESSED:
        return [kind, binascii.b2a_base64(data, newline=False).decode()]
    return ["z" + kind, binascii.b2a_base64(zlib.compress(data, 1), newline=False).decode()]


def _decode(packed: list[str], rows: int) -> NDArray[Any]:
    kind, text = packed
    data = binascii.a2b_base64(text)
    if kind.startswith("z"):
        data = zlib.decompress(data)
    values = np.frombuffer(data, kind.removeprefix("z"))
    if len(values) != rows:
        raise ValueError(f"a column with {len(values)} values instead of {rows}")
    return values


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
            return _digest_items(entry)
        case Batches():
            values = [*(getattr(entry, name) for name in COLUMNS), entry.tokens or (0,) * len(entry)]
            return block_items((number, 0), entry.first, entry.clock, np.array(values, np.int64).T, entry.losses)


def event_items(event: str, clock: float, counters: Sequence[float], data: Mapping[str, Any]) -> Items:
    return "happened", event, round(clock, 6), counters, data


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
    packed = [pack(*column) for column in ranges]
    packed_losses = None if losses is None else pack_floats(losses)
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


def _values(request: Request) -> tuple[str | int | float | None, ...]:
    place = request.epoch, request.batch, request.step
    change = (request.target, request.value) if request.verb in CHANGES else ()
    extra = (*change, *filter(None, [request.through]))
    return request.verb, request.by, request.reason, *place, request.times, request.rank, request.event, *extra


def _column_starts(first: Counters) -> tuple[int, ...]:
    seconds, skips = round(first.seconds * 100), (first.skipped_steps, first.skipped_batches)
    return seconds, first.steps, *skips, first.samples, 0, first.tokens


def _digest_items(block: DigestBlock) -> Items:
    packed = {name: pack_words(block.columns[name]) for name in DIGESTS}
    taken = {name: column for name, column in packed.items() if column != 0}
    first = block.rates[0]
    rates = first if block.rates.count(first) == len(block) else pack_floats(block.rates)
    return "digests", block.epoch, block.first, len(block), taken, rates, block.chain, block.length


def _digests(epoch: int, first: int, rows: int, packed: Any, rates: Any, chain: str, length: int) -> DigestBlock:
    words = {name: unpack_words(packed.get(name, 0), rows) for name in DIGESTS}
    all_rates = array("d", [rates]) * rows if isinstance(rates, int | float) else unpack_floats(rates, rows)
    return DigestBlock(epoch, first, words, all_rates, chain, length)


def _event(event: str, clock: float, counters: list[Any], data: dict[str, Any]) -> EventEntry:
    return EventEntry(event, float(clock), Counters(*counters), data)


def _request(number: int, values: list[Any]) -> RequestEntry:
    request, extra = Request(*values[:9]), values[9:]
    if request.verb in CHANGES:
        request.target, request.value, *extra = extra
    if extra:
        (request.through,) = extra
    return RequestEntry(number, request)


def _times(rows: list[list[Any]]) -> TimesEntry:
    return TimesEntry(tuple(HandlerTime(*row) for row in rows))


def _batches(number: int, part: int, counters: list[Any], clock: float, rows: int, packed: Any, losses: Any) -> Batches:  # noqa: ARG001  # the reader uses the number and the part
    first = Counters(*counters)
    starts = _column_starts(first)[: len(packed)]
    centiseconds, steps, skipped_steps, skipped_batches, samples, window, *optional = (
        unpack(column, rows, start) for column, start in zip(packed, starts, strict=True)
    )
    tokens = optional[0] if optional else None
    numbers = None if losses is None else unpack_floats(losses, rows)
    return Batches(
        first, float(clock), steps, skipped_steps, skipped_batches, samples, window, centiseconds, numbers, tokens
    )


_DECODERS: dict[str, Callable[..., Entry]] = {
    "happened": _event,
    "asked": _request,
    "recounted": RepeatEntry,
    "spent": _times,
    "batches": _batches,
    "digests": _digests,
}
