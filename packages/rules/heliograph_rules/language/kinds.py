"""The types that values have in rules, and what operators and functions make of them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

NONE = type(None)
Kinds = frozenset[type]

WHOLE: Kinds = frozenset({bool, int})
NUMBERS: Kinds = WHOLE | {float}
SEQUENCES: Kinds = frozenset({str, list, tuple})
ITERABLES: Kinds = SEQUENCES | {dict, set}
ANY: Kinds = NUMBERS | ITERABLES | {NONE}
NEITHER: Kinds = frozenset()

SHIFTS = (ast.LShift, ast.RShift)
BITWISE = (ast.BitAnd, ast.BitOr, ast.BitXor)
SYMBOLS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.USub: "-",
    ast.UAdd: "+",
    ast.Invert: "~",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
}


def binary_kinds(operator: type[ast.operator], left: type, right: type) -> Kinds:
    """Return what types `left operator right` can have; none where the two do not go together."""
    if left in NUMBERS and right in NUMBERS:
        return _number_kinds(operator, left, right)
    if operator is ast.Add and left is right and left in SEQUENCES:
        return frozenset({left})
    if operator is ast.Mult and left in SEQUENCES and right in WHOLE:
        return frozenset({left})
    if operator is ast.Mult and left in WHOLE and right in SEQUENCES:
        return frozenset({right})
    if (operator is ast.Sub or operator in BITWISE) and left is right is set:
        return frozenset({set})
    return NEITHER


def _number_kinds(operator: type[ast.operator], left: type, right: type) -> Kinds:
    is_whole = left in WHOLE and right in WHOLE
    if operator in SHIFTS or operator in BITWISE:
        if not is_whole:
            return NEITHER
        return frozenset({bool if left is right is bool and operator in BITWISE else int})
    if operator is ast.Pow and is_whole:
        return frozenset({int, float})
    return frozenset({int if is_whole and operator is not ast.Div else float})


def unary_kinds(operator: type[ast.unaryop], operand: type) -> Kinds:
    """Return what types `operator operand` can have; none where it cannot be."""
    if operator is ast.Not:
        return frozenset({bool})
    if operand in WHOLE:
        return frozenset({int})
    return frozenset({float}) if operand is float and operator is not ast.Invert else NEITHER


def can_compare(operator: type[ast.cmpop], left: type, right: type) -> bool:
    """Whether `left operator right` has a meaning."""
    if operator in (ast.Eq, ast.NotEq, ast.Is, ast.IsNot):
        return True
    if operator in (ast.In, ast.NotIn):
        return right in ITERABLES and (right is not str or left is str)
    return (left in NUMBERS and right in NUMBERS) or (left is right and left in SEQUENCES | {set})


@dataclass(frozen=True)
class Signature:
    """How a function of the language is called.

    Attributes:
        takes: the types that its first argument may have.
        gives: the types that its result can have.
        least: how many arguments it needs.
        most: how many it takes; None where there is no end.
    """

    takes: Kinds
    gives: Kinds
    least: int = 1
    most: int | None = 1

    def allows(self, count: int) -> bool:
        """Whether it can be called with so many arguments."""
        return self.least <= count and (self.most is None or count <= self.most)

    def counts(self) -> str:
        """Return how many arguments it can be called with, in words."""
        if self.most is None:
            return f"{self.least} or more"
        return str(self.least) if self.most == self.least else f"{self.least} to {self.most}"

    def taken(self, count: int) -> Kinds:
        """Return the types that the first of so many arguments may have."""
        return ANY if self.most is None and count > 1 else self.takes  # `min(a, b)` takes any, `min(a)` a list


REAL: Kinds = frozenset({int, float})
SIGNATURES = {
    "abs": Signature(NUMBERS, REAL),
    "all": Signature(ITERABLES, frozenset({bool})),
    "any": Signature(ITERABLES, frozenset({bool})),
    "dict": Signature(ITERABLES - {str}, frozenset({dict}), least=0),
    "float": Signature(NUMBERS | {str}, frozenset({float})),
    "int": Signature(NUMBERS | {str}, frozenset({int}), most=2),
    "len": Signature(ITERABLES, frozenset({int})),
    "list": Signature(ITERABLES, frozenset({list}), least=0),
    "math_ceil": Signature(NUMBERS, frozenset({int})),
    "math_floor": Signature(NUMBERS, frozenset({int})),
    "math_sqrt": Signature(NUMBERS, frozenset({float})),
    "math_trunc": Signature(NUMBERS, frozenset({int})),
    "max": Signature(ITERABLES, ANY, most=None),
    "min": Signature(ITERABLES, ANY, most=None),
    "rand": Signature(ANY, frozenset({float}), least=0, most=0),
    "randint": Signature(NUMBERS, frozenset({int})),
    "round": Signature(NUMBERS, REAL, most=2),
    "set": Signature(ITERABLES, frozenset({set}), least=0),
    "sorted": Signature(ITERABLES, frozenset({list})),
    "str": Signature(ANY, frozenset({str})),
    "sum": Signature(ITERABLES - {str}, REAL, most=2),
    "tuple": Signature(ITERABLES, frozenset({tuple}), least=0),
}


def name_kinds(kinds: Kinds) -> str:
    """Return the names of some types, for an error sentence."""
    return " or ".join(sorted("None" if kind is NONE else kind.__name__ for kind in kinds))
