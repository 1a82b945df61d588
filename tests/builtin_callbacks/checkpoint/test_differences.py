from __future__ import annotations

import math
import struct

import pytest
from heliograph.builtin_callbacks.checkpoint.verify_resume import Row, difference
from heliograph.core.trace import shortest
from heliograph.events.progress import verified
from heliograph.tests.messages import assert_facts

ROW = Row(253, 13, 253, 2024, 0.4513, 0, 253)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (1, ("1 repeated step ", "identical")),
        (37, ("37 repeated steps ", "identical")),
        (1234, ("1,234 repeated steps ", "identical")),
    ],
)
def test_how_many_were_equal(steps: int, text: tuple[str, str]) -> None:
    assert_facts(verified(steps), "verified", *text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss": 0.4512}, "loss differs: 0.4513 in the killed run, 0.4512 in this run"),
        ({"loss": 0.45130001}, "0.4513 in the killed run, 0.45130001 in"),
        ({"loss": math.nan}, "0.4513 in the killed run, nan in"),
        ({"steps": 252}, "batch (optimizer steps) differs: 253 in the killed run, 252"),
        ({"samples": 2020}, "(samples) differs"),
        ({"batch": 14, "loss": 0.1}, "(batch of the epoch) differs"),
        ({"loss": 0.0, "end": -253}, "(skipped) differs: False in the killed run, True"),
        ({"other_digest": 5}, "loss (of another optimizer) differs"),
        ({"other_digest": 5, "loss": 0.5}, "0.4513 in the killed run, 0.5 in"),
    ],
)
def test_what_differs(changes: dict[str, float], text: str) -> None:
    other = ROW._replace(**changes)  # type: ignore[arg-type]
    assert_facts(difference(ROW, other), "DIVERGED", f"step {other.steps}", text)
    assert_facts(difference(ROW, other, 1), "DIVERGED", f"step {other.steps}", text, "rank 1")


def test_numbers_have_the_digits_that_it_takes() -> None:
    one = struct.unpack("<d", struct.pack("<Q", struct.unpack("<Q", struct.pack("<d", 0.1))[0] + 1))[0]
    assert shortest(0.25, 0.5) == ["0.25", "0.5"]
    assert shortest(0.1, one) == ["0.1", "0.10000000000000002"]
    assert shortest(math.nan, math.nan) == ["nan", "nan"]
