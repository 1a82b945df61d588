"""Any field of an event becomes plain data of a bounded size."""

from __future__ import annotations

import json
import math
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph_recorder.format.plain import shorten, to_plain, to_plain_metrics
from hypothesis import given
from hypothesis import strategies as st

BOUND = 200_000  # characters of JSON


class Colour(Enum):
    RED = 1


class Broken:
    def __repr__(self) -> str:
        raise OSError("no")


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (0.1, 0.1),
        (math.inf, math.inf),
        ("text", "text"),
        (Path("a/b"), "a/b"),
        (Colour.RED, "RED"),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        ((1, (2,)), [1, [2]]),
        ({"a": {1: 2.5}}, {"a": {"1": 2.5}}),
        (torch.zeros(2, 3), "tensor of shape [2, 3], torch.float32, on cpu"),
        (ValueError("broken"), "ValueError: broken"),
        (ValueError(), "ValueError"),
        (Broken(), "<Broken, whose repr raised OSError>"),
        (b"ab", "b'ab'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_are_kept_and_others_described(value: Any, kept: Any) -> None:
    assert to_plain(value) == kept


def test_nan_is_kept() -> None:
    assert math.isnan(to_plain(float("nan")))


def test_cuts_are_marked() -> None:
    assert shorten("x" * 2_120) == "x" * 2_000 + "… (+120 characters)"
    assert to_plain(list(range(300)))[-1] == "… (+200 items)"
    assert to_plain({str(index): index for index in range(300)})["…"] == "(+200 items)"


def test_a_value_that_contains_itself() -> None:
    value: list[Any] = []
    value.append(value)
    assert len(json.dumps(to_plain(value))) < BOUND


def test_metrics_are_floats_up_to_a_limit() -> None:
    kept, left_out = to_plain_metrics({f"m{index}": np.float32(index) for index in range(2_500)})
    assert (len(kept), left_out, kept["m7"], type(kept["m7"])) == (2_000, 500, 7.0, float)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.sets(st.integers()),
    max_leaves=50,
)


@given(VALUES, st.integers(1, 500))
def test_any_value_becomes_bounded_json(value: Any, times: int) -> None:
    assert len(json.dumps(to_plain([value] * times), ensure_ascii=False)) < 60 * BOUND  # of at most 50 texts each
