"""The line of digests."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heliograph.packages.recorder.tests.recordings import attempt, encode, write
from heliograph_recorder.format.lines import decode, format_line, parse_line
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import DIGESTS, DigestBlock
from hypothesis import given
from hypothesis import strategies as st

WORDS = st.integers(0, 2**32 - 1)


@st.composite
def digests(draw: st.DrawFn) -> DigestBlock:
    rows = draw(st.integers(1, 100))

    def column() -> Sequence[int]:
        if draw(st.booleans()):
            return array("I", [draw(WORDS)]) * rows
        return array("I", draw(st.lists(WORDS, min_size=rows, max_size=rows)))

    rates = array("d", draw(st.floats(allow_nan=False).map(lambda rate: [rate] * rows) | st.just(range(rows))))
    columns = {name: column() for name in DIGESTS}
    return DigestBlock(draw(WORDS), draw(WORDS), columns, rates)


@given(digests())
def test_a_block_is_equal_after_encoding_and_decoding(block: DigestBlock) -> None:
    assert decode(parse_line(encode(block))) == block


def test_a_rate_that_is_unknown(tmp_path: Path) -> None:
    block = DigestBlock(0, 1, dict.fromkeys(DIGESTS, (1, 2)), (math.nan, 0.5))
    (found,) = read(write(tmp_path / "x.recording", attempt(block))).attempts[0].entries
    assert isinstance(found, DigestBlock)
    assert list(map(repr, found.rates)) == ["nan", "0.5"]


GOOD: list[Any] = ["digests", 0, 1, 2, {**dict.fromkeys(DIGESTS, 0), "batch": 7}, 0.1]


def test_a_column_of_equal_words_is_one_number() -> None:
    found = decode(parse_line(format_line(*GOOD)))
    assert isinstance(found, DigestBlock)
    assert [list(found.columns["batch"]), list(found.columns["loss"]), list(found.rates)] == [
        [7, 7],
        [0, 0],
        [0.1, 0.1],
    ]
