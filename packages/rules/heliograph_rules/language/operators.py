"""The operators of the language of rules, on plain values and within the limits."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import partial
from reprlib import repr as shortened
from typing import Any

from ..errors import RuleTypeError
from .kinds import NUMBERS, SEQUENCES, SYMBOLS, WHOLE, can_combine, can_compare, name_kinds
from .limits import check_bits, check_length
from .values import INCORRECT, Container, Unavailable, ValueReader

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: lambda operand: operator.invert(int(operand)),  # ~ of a bool is deprecated
}
ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Operators:
    """The operators as a table for simpleeval."""

    def __init__(self, reader: ValueReader) -> None:
        self.reader = reader

    def table(self) -> dict[type[ast.AST], Callable[..., Any]]:
        return {
            **{kind: partial(self.binary, kind) for kind in BINARY},
            **{kind: partial(self.unary, kind) for kind in UNARY},
            **{kind: partial(self.order, kind) for kind in ORDER},
            ast.Not: operator.not_,
            ast.Eq: self.equal,
            ast.NotEq: lambda left, right: not self.equal(left, right),
            ast.Is: self.same,
            ast.IsNot: lambda left, right: not self.same(left, right),
            ast.In: self.holds,
            ast.NotIn: lambda left, right: not self.holds(left, right),
        }

    def binary(self, kind: type[ast.operator], left: Any, right: Any) -> Any:
        left, right = self.reader.plain(left), self.reader.plain(right)
        if not can_combine(kind, type(left), type(right)):
            raise RuleTypeError(mismatch(kind, left, right))
        if kind in LIMITS:
            LIMITS[kind](left, right)
        return self.checked(BINARY[kind](left, right))

    def unary(self, kind: type[ast.unaryop], operand: Any) -> Any:
        operand = self.reader.plain(operand)
        if type(operand) not in (WHOLE if kind is ast.Invert else NUMBERS):
            raise RuleTypeError(f"{INCORRECT}: {SYMBOLS[kind]} of {shortened(operand)} is not defined.")
        return self.checked(UNARY[kind](operand))

    def order(self, kind: type[ast.cmpop], left: Any, right: Any) -> bool:
        left, right = self.reader.plain(left), self.reader.plain(right)
        if not can_compare(kind, type(left), type(right)):
            raise RuleTypeError(mismatch(kind, left, right))
        return ORDER[kind](left, right)

    def equal(self, left: Any, right: Any) -> bool:
        if left is None or right is None:  # a metric without a value equals None
            return is_none(left) and is_none(right)
        return bool(self.reader.plain(left) == self.reader.plain(right))

    def same(self, left: Any, right: Any) -> bool:
        if left is None or right is None:
            return is_none(left) and is_none(right)
        return self.reader.plain(left) is self.reader.plain(right)

    def holds(self, left: Any, right: Any) -> bool:
        left = self.reader.plain(left)
        if type(right) is Container and right.base is dict:  # only its keys are compared
            self.reader.budget.charge(4 * len(right))
            right = set(self.reader.keys(right))
        right = self.reader.plain(right)
        if not can_compare(ast.In, type(left), type(right)):
            raise RuleTypeError(mismatch(ast.In, left, right))
        if type(right) is str:
            self.reader.budget.charge((len(left) + len(right)) // 4)
        return (self.reader.key(left) if type(right) in (set, dict) else left) in right

    def checked(self, value: Any) -> Any:
        if type(value) is complex:
            raise RuleTypeError(f"{INCORRECT}: a root of a negative number is not defined.")
        if type(value) is int:
            check_bits(value.bit_length())
        elif type(value) in SEQUENCES:
            check_length(len(value))
            self.reader.budget.charge(len(value))
        return value


def is_none(value: Any) -> bool:
    return value is None or type(value) is Unavailable


def mismatch(kind: type[ast.AST], left: Any, right: Any) -> str:
    types = " and ".join(name_kinds(frozenset({type(operand)})) for operand in (left, right))
    problem = f"{INCORRECT}: {shortened(left)} {SYMBOLS[kind]} {shortened(right)} ({types}) is not defined."
    return f"{problem} Read a dict by key: metric.key." if dict in (type(left), type(right)) else problem


def _limit_sum(left: Any, right: Any) -> None:
    if type(left) in SEQUENCES:
        check_length(len(left) + len(right))


def _limit_product(left: Any, right: Any) -> None:
    for sequence, factor in ((left, right), (right, left)):
        if type(sequence) in SEQUENCES:
            check_length(len(sequence) * factor)


def _limit_power(left: Any, right: Any) -> None:
    if type(left) in WHOLE and type(right) in WHOLE and right > 0:
        check_bits(left.bit_length() * right)


def _limit_shift(left: Any, right: Any) -> None:
    check_bits(left.bit_length() + right)


LIMITS: dict[type[ast.operator], Callable[[Any, Any], None]] = {
    ast.Add: _limit_sum,
    ast.Mult: _limit_product,
    ast.Pow: _limit_power,
    ast.LShift: _limit_shift,
}
