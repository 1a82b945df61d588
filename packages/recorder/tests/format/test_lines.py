"""Entries are equal after encoding and decoding, to the last bit."""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from heliograph.events import Request
from heliograph.packages.recorder.tests.recordings import attempt, encode, write
from heliograph_recorder.format.lines import decode, format_line, parse_line
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import (
    COLUMNS,
    Batches,
    Counters,
    Entry,
    EventEntry,
    HandlerTime,
    RepeatEntry,
    RequestEntry,
    TimesEntry,
)
from hypothesis import given
from hypothesis import strategies as st

NUMBERS = st.integers(0, 2**40)
SECONDS = NUMBERS.map(lambda number: number / 100)
COUNTERS = st.builds(Counters, *[NUMBERS] * 9, seconds=SECONDS, tokens=NUMBERS)
FLOATS = st.floats(allow_nan=True)
TEXTS = st.text(max_size=20)
DATA = st.dictionaries(TEXTS, st.none() | FLOATS | st.text() | st.lists(NUMBERS))
REQUESTS = st.builds(
    Request, st.sampled_from(["stop", "save"]), TEXTS, TEXTS, NUMBERS, NUMBERS, NUMBERS, NUMBERS,
    st.none() | st.integers(0, 9), TEXTS, through=TEXTS,
)  # fmt: skip
PLACE = [NUMBERS] * 4
CHANGES = st.builds(
    Request, st.just("set_learning_rate"), TEXTS, TEXTS, *PLACE, target=TEXTS, value=st.floats(0.0, 1e9), through=TEXTS
) | st.builds(
    Request, st.sampled_from(["enable_plugin", "disable_plugin"]), TEXTS, TEXTS, *PLACE, target=TEXTS, through=TEXTS
)


@st.composite
def blocks(draw: st.DrawFn) -> Batches:
    rows = draw(st.integers(1, 400))

    def column(most: int) -> tuple[int, ...]:
        if draw(st.booleans()):
            step, start = draw(st.integers(0, most)), draw(NUMBERS)
            return tuple(start + step * index for index in range(rows))
        return tuple(draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows)))

    losses = st.none() | st.lists(st.floats(width=32) | FLOATS, min_size=rows, max_size=rows).map(tuple)
    sizes = (900, 9, 300, 70_000, 2**40, 9, 50)
    columns: dict[str, Any] = {name: column(most) for name, most in zip(COLUMNS, sizes, strict=True)}
    return Batches(draw(COUNTERS), draw(SECONDS), **columns, losses=draw(losses))


ENTRIES = st.one_of(
    st.builds(EventEntry, TEXTS, SECONDS, COUNTERS, DATA),
    st.builds(RequestEntry, NUMBERS, REQUESTS | CHANGES),
    st.builds(RepeatEntry, NUMBERS, NUMBERS),
    st.builds(
        TimesEntry,
        st.lists(st.builds(HandlerTime, TEXTS, TEXTS, NUMBERS, NUMBERS, SECONDS, SECONDS), max_size=3).map(tuple),
    ),
    blocks(),
)


def bits(entry: Entry) -> str:
    """Return a text that differs if any bit of a number does, and is equal for two NaN."""
    if not isinstance(entry, Batches):
        return repr(entry)
    values = (getattr(entry, each.name) for each in fields(entry))
    return repr([tuple(each) if isinstance(each, range | array) else each for each in values])


@given(ENTRIES)
def test_an_entry_is_equal_after_decoding(entry: Entry) -> None:
    line = encode(entry)
    assert "\n" not in line
    assert bits(decode(parse_line(line))) == bits(entry)


@given(ENTRIES, st.data())
def test_a_line_that_is_cut_short_is_damaged(entry: Entry, data: st.DataObject) -> None:
    line = encode(entry)
    end = data.draw(st.integers(0, len(line) - 1))
    with pytest.raises(ValueError, match="damaged"):
        parse_line(line[:end])


@given(ENTRIES, st.data())
def test_a_line_with_a_wrong_bit_is_damaged(entry: Entry, data: st.DataObject) -> None:
    line = bytearray(encode(entry).encode())
    line[data.draw(st.integers(0, len(line) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match="damaged"):
        parse_line(bytes(line))


@pytest.mark.parametrize("text", ["1", "[]", "[1]"], ids=["number", "empty", "name"])
def test_a_line_that_is_not_an_array_with_a_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not "):
        parse_line(f"{text}\t{crc32(text.encode()):08x}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)
KINDS = st.sampled_from(["happened", "asked", "recounted", "spent", "batches", "attempt", "new"])


@given(KINDS, st.lists(JSON, max_size=8))
def test_any_line_is_an_entry_or_a_value_error(kind: str, rest: list[Any]) -> None:
    with suppress(ValueError):
        decode(parse_line(format_line(kind, *rest)))


def test_an_attempt_is_equal_after_reading(tmp_path: Path) -> None:
    original = attempt(
        EventEntry("train_start", 0.0, Counters()),
        max_steps=7,
        validation_sets=("a", "b"),
        hyper_parameters={"lr": 0.1, "layers": [1, 2]},
        plan={"log": ("x", "y")},
        losses=True,
    )
    recording = read(write(tmp_path / "x.recording", original, replace(original, name="a2")))
    assert recording.attempts == (original, replace(original, name="a2"))


def test_a_block_is_compact() -> None:
    rows = range(1, 1_001)
    steps, zeros = tuple(rows), (0,) * 1_000
    regular = Batches(Counters(), 10.0, steps, steps, zeros, zeros, steps, zeros, zeros)
    assert len(encode(regular)) < 100
