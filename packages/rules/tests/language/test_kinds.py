"""What goes together in rules is what goes together in Python, but for what could do harm."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from heliograph_rules.errors import RuleTypeError
from heliograph_rules.language.kinds import ANY, SIGNATURES, can_combine, can_compare
from heliograph_rules.language.limits import Budget
from heliograph_rules.language.operators import BINARY, ORDER, UNARY, Operators
from heliograph_rules.language.values import ValueReader

SAMPLES: list[Any] = [
    True,
    False,
    0,
    1,
    3,
    -2,
    0.0,
    2.5,
    "",
    "ab",
    None,
    [],
    [1],
    (),
    (1, 2),
    {},
    {1: 2},
    set(),
    {1, 2},
]
# Python can do these, and rules cannot: a text could be written a billion wide, and dicts do not add up.
NOT_OURS = {(ast.Mod, str), (ast.BitOr, dict)}


def pairs(operators: Any) -> Iterator[tuple[Any, Any, Any]]:
    return product(operators, SAMPLES, SAMPLES)


def test_binary_operators_take_what_python_takes() -> None:
    for kind, left, right in pairs(BINARY):
        can = can_combine(kind, type(left), type(right))
        try:
            BINARY[kind](left, right)
        except TypeError:
            assert not can, (kind, left, right)
        except (ArithmeticError, ValueError):
            assert can, (kind, left, right)
        else:
            assert can or (kind, type(left)) in NOT_OURS, (kind, left, right)


def test_unary_operators_take_numbers() -> None:
    operators = Operators(ValueReader(Budget()))
    for kind, value in product(UNARY, SAMPLES):
        if type(value) in ((bool, int) if kind is ast.Invert else (bool, int, float)):
            assert operators.unary(kind, value) == UNARY[kind](value)
        else:
            with pytest.raises(RuleTypeError, match="is not defined"):
                operators.unary(kind, value)


def test_values_can_be_ordered_where_python_orders_them() -> None:
    for kind, left, right in pairs(ORDER):
        try:
            ORDER[kind](left, right)
        except TypeError:
            can = False
        else:
            can = True
        assert can_compare(kind, type(left), type(right)) is can, (kind, left, right)


@pytest.mark.parametrize("kind", [ast.Eq, ast.NotEq, ast.Is, ast.IsNot])
def test_any_two_values_can_be_equal(kind: type[ast.cmpop]) -> None:
    assert all(can_compare(kind, left, right) for left, right in product(ANY, ANY))


def test_values_are_sought_where_python_seeks_them() -> None:
    for left, right in product(SAMPLES, SAMPLES):
        try:
            found = left in right
        except TypeError as error:
            can = "unhashable" in str(error)
        else:
            can = found in (True, False)
        assert can_compare(ast.In, type(left), type(right)) is can, (left, right)


def test_the_functions_are_those_that_are_promised() -> None:
    theirs = (
        "abs len round sum math_trunc math_floor math_ceil math_sqrt rand randint int float str list tuple dict set"
    )
    assert {*theirs.split(), "min", "max", "any", "all", "sorted"} == {*SIGNATURES}
