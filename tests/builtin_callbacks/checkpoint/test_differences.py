from __future__ import annotations

import math
import struct

import pytest
from heliograph.builtin_callbacks.checkpoint.verify_resume import Row, difference
from heliograph.core.objects.equality import shortest
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
        ({"loss": 0.4512}, "loss 0.4512, was 0.4513"),
        ({"loss": 0.45130001}, "loss 0.45130001, was 0.4513"),
        ({"loss": math.nan}, "loss nan, was 0.4513"),
        ({"steps": 252}, "steps 252, was 253"),
        ({"samples": 2020}, "samples 2020, was 2024"),
        ({"batch": 14, "loss": 0.1}, "epoch 14, was 13"),
        ({"loss": 0.0, "end": -253}, "batch skipped, was trained on"),
        ({"other_digest": 5}, "digest of the other losses 5, was 0"),
        ({"other_digest": 5, "loss": 0.5}, "loss 0.5, was 0.4513"),
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
