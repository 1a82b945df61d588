"""Numbers that are given as arguments."""

from __future__ import annotations

from fractions import Fraction
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.events.checks import (
    check_flag,
    check_number,
    check_whole_number,
    is_number,
    is_whole_number,
)
from heliograph.tests.messages import assert_facts


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_a_whole_number_comes_back_as_an_integer_of_python(value: Any) -> None:
    assert is_whole_number(value)
    assert type(check_whole_number("n", value, at_least=3, at_most=3)) is int
    assert check_number("n", value) == 3


@pytest.mark.parametrize("value", [0.5, np.float64(0.5), np.float32(0.5), Fraction(1, 2)])
def test_a_number_comes_back_as_one_of_python(value: Any) -> None:
    assert is_number(value)
    assert not is_whole_number(value)
    assert type(check_number("x", value)) is float
    assert check_number("x", value) == 0.5


@pytest.mark.parametrize("value", [True, np.True_, nan, inf, -inf, np.float64(nan), "1", None, 1j, torch.tensor(1)])
def test_other_things_are_no_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="finite number;"):
        check_number("x", value)
    with pytest.raises(ValueError, match="whole number;"):
        check_whole_number("n", value)


@pytest.mark.parametrize("value", [1.0, np.float64(1.0), Fraction(1)])
def test_a_float_is_no_whole_number(value: Any) -> None:
    with pytest.raises(ValueError, match="whole number;"):
        check_whole_number("n", value)


def test_flags() -> None:
    check_flag("plain", True)
    check_flag("plain", False)
    for value in (1, 0, "yes", None, np.bool_(True)):
        with pytest.raises(TypeError) as caught:
            check_flag("plain", value)
        assert_facts(caught.value, "plain", "True or False", repr(value))
    with pytest.raises(TypeError, match=r"None, got 1\.$"):
        check_flag("plain", 1, or_else="None")


def test_infinity_is_taken_where_it_makes_sense_and_nan_never() -> None:
    assert check_number("x", inf, more_than=0, finite=False) == inf
    with pytest.raises(ValueError, match=r"x .*number; got nan"):
        check_number("x", nan, finite=False)
    with pytest.raises(ValueError, match="number, more than 0;"):
        check_number("x", -inf, more_than=0, finite=False)


def test_limits() -> None:
    assert check_number("x", 0, at_least=0) == 0
    assert check_number("x", 10**400) == 10**400
    for value in (0, 1):
        with pytest.raises(ValueError, match=rf"1; got {value}\.$"):
            check_number("x", value, more_than=0, less_than=1)
    with pytest.raises(ValueError, match="least 0, or None;"):
        check_number("x", -1, of="seconds", at_least=0, or_else="None")
    for value in (-1, 256):
        with pytest.raises(ValueError, match=rf"most 255; got {value}\.$"):
            check_whole_number("n", value, at_least=0, at_most=255)
    with pytest.raises(ValueError, match="least 1, or None"):
        check_whole_number("n", 0, of="steps", at_least=1, or_else="None for all")
