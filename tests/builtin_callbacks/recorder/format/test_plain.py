"""Whatever an event carries, it is kept as plain data of a bounded size."""

from __future__ import annotations

import json
import math
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.builtin_callbacks.recorder.format.plain import plain, plain_metrics, short
from hypothesis import given
from hypothesis import strategies as st

BOUND = 200_000  # characters of JSON, whatever is given


class Colour(Enum):
    RED = 1


class Unspeakable:
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
        (np.zeros((2, 3)), "array of shape [2, 3], float64"),
        (ValueError("broken"), "ValueError: broken"),
        (ValueError(), "ValueError"),
        (Path, "pathlib.Path"),
        (10**400, "a whole number of 1329 bits"),
        (Unspeakable(), "<Unspeakable, whose repr raised OSError>"),
        (b"ab", "b'ab'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_plain_stays_and_the_rest_is_described(value: Any, kept: Any) -> None:
    assert plain(value) == kept


def test_nan_stays() -> None:
    assert math.isnan(plain(float("nan")))


def test_what_is_cut_is_said_in_its_place() -> None:
    assert short("x" * 2_120) == "x" * 2_000 + "… (+120 characters)"
    assert plain(list(range(300)))[-1] == "… (+100 items)"
    assert plain({str(index): index for index in range(300)})["…"] == "(+100 items)"


def test_a_deep_value_ends() -> None:
    value: list[Any] = []
    value.append(value)
    assert len(json.dumps(plain(value))) < BOUND


def test_metrics_are_numbers_and_so_many() -> None:
    kept, left_out = plain_metrics({f"m{index}": np.float32(index) for index in range(2_500)})
    assert (len(kept), left_out, kept["m7"], type(kept["m7"])) == (2_000, 500, 7.0, float)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.sets(st.integers()),
    max_leaves=50,
)


@given(VALUES, st.integers(1, 500))
def test_any_value_becomes_bounded_json(value: Any, times: int) -> None:
    assert len(json.dumps(plain([value] * times))) < BOUND
