"""The types of values in rules, and the types that operators and functions accept."""

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


def can_combine(operator: type[ast.operator], left: type, right: type) -> bool:
    if left in NUMBERS and right in NUMBERS:
        return operator not in SHIFTS + BITWISE or (left in WHOLE and right in WHOLE)
    if operator is ast.Add:
        return left is right and left in SEQUENCES
    if operator is ast.Mult:
        return (left in SEQUENCES and right in WHOLE) or (left in WHOLE and right in SEQUENCES)
    return (operator is ast.Sub or operator in BITWISE) and left is right is set


def can_compare(operator: type[ast.cmpop], left: type, right: type) -> bool:
    if operator in (ast.Eq, ast.NotEq, ast.Is, ast.IsNot):
        return True
    if operator in (ast.In, ast.NotIn):
        return right in ITERABLES and (right is not str or left is str)
    return (left in NUMBERS and right in NUMBERS) or (left is right and left in SEQUENCES | {set})


@dataclass(frozen=True)
class Signature:
    """How a function is called.

    Attributes:
        takes: the allowed types of the first argument.
        least: the minimum number of arguments.
        most: the maximum number of arguments; None is unlimited.
    """

    takes: Kinds
    least: int = 1
    most: int | None = 1

    def allows(self, count: int) -> bool:
        return self.least <= count and (self.most is None or count <= self.most)

    def describe_counts(self) -> str:
        if self.most is None:
            return f"{self.least} or more"
        return str(self.least) if self.most == self.least else f"{self.least} to {self.most}"

    def first_types(self, count: int) -> Kinds:
        return ANY if self.most is None and count > 1 else self.takes  # min(a, b) takes any types, min(a) a list


SIGNATURES = {
    "abs": Signature(NUMBERS),
    "all": Signature(ITERABLES),
    "any": Signature(ITERABLES),
    "dict": Signature(ITERABLES - {str}, least=0),
    "float": Signature(NUMBERS | {str}),
    "int": Signature(NUMBERS | {str}, most=2),
    "len": Signature(ITERABLES),
    "list": Signature(ITERABLES, least=0),
    "math_ceil": Signature(NUMBERS),
    "math_floor": Signature(NUMBERS),
    "math_sqrt": Signature(NUMBERS),
    "math_trunc": Signature(NUMBERS),
    "max": Signature(ITERABLES, most=None),
    "min": Signature(ITERABLES, most=None),
    "rand": Signature(ANY, least=0, most=0),
    "randint": Signature(NUMBERS),
    "round": Signature(NUMBERS, most=2),
    "set": Signature(ITERABLES, least=0),
    "sorted": Signature(ITERABLES),
    "str": Signature(ANY),
    "sum": Signature(ITERABLES - {str}, most=2),
    "tuple": Signature(ITERABLES, least=0),
}


def name_kinds(kinds: Kinds) -> str:
    return " or ".join(sorted("None" if kind is NONE else kind.__name__ for kind in kinds))
