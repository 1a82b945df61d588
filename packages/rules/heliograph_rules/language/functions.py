"""The functions of the language of rules, on plain values and within the limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from reprlib import repr as shortened
from typing import Any

from ..errors import RuleLimitError, RuleTypeError
from .kinds import NUMBERS, SIGNATURES, WHOLE, name_kinds
from .limits import MAX_DIGITS, NODE
from .operators import Operators
from .values import INCORRECT


class Functions:
    """The functions, as simpleeval wants them.

    Args:
        operators: they check what the functions give.
        draw: gives the next random number, from 0 up to 1.
    """

    def __init__(self, operators: Operators, draw: Callable[[], float]) -> None:
        self.operators, self.reader, self.draw = operators, operators.reader, draw
        self.plain: dict[str, Callable[..., Any]] = {
            "abs": abs,
            "all": all,
            "any": any,
            "dict": self.to_dict,
            "float": float,
            "int": int,
            "list": list,
            "math_ceil": math.ceil,
            "math_floor": math.floor,
            "math_sqrt": math.sqrt,
            "math_trunc": math.trunc,
            "max": max,
            "min": min,
            "rand": self.rand,
            "randint": lambda top: int(self.rand() * top),
            "round": rounded,
            "set": self.to_set,
            "sorted": sorted,
            "str": str,
            "sum": added,
            "tuple": tuple,
        }

    def table(self) -> dict[str, Callable[..., Any]]:
        """Return a function for every name."""
        return {"len": self.reader.size, **{name: partial(self.call, name) for name in self.plain}}

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what a function gives.

        Raises:
            RuleLimitError: it would take too long, or its value is too large.
            RuleTypeError: its arguments have types that it does not take.
        """
        before = self.reader.budget.left
        values = [self.reader.plain(each) for each in arguments]
        weight = before - self.reader.budget.left
        taken = SIGNATURES[name].taken(len(values))
        if values and type(values[0]) not in taken:
            raise RuleTypeError(f"{INCORRECT}: {name} takes {name_kinds(taken)}, got {shortened(values[0])}.")
        self.reader.budget.charge(NODE + weight * self._factor(name, values))
        if name in ("list", "tuple") and values and type(values[0]) is set:
            values = [list(self.reader.items(values[0]))]
        return self.operators.checked(self.plain[name](*values))

    def rand(self) -> float:
        """Return the next random number."""
        self.reader.budget.charge(100)
        return self.draw()

    def to_dict(self, pairs: Any = ()) -> dict[Any, Any]:
        """Return a dict, from one or from pairs."""
        return {self.reader.key(key): value for key, value in (pairs.items() if type(pairs) is dict else pairs)}

    def to_set(self, values: Any = ()) -> set[Any]:
        """Return a set."""
        return {self.reader.key(each) for each in values}

    def _factor(self, name: str, values: list[Any]) -> int:
        """Return how much more work a function is than to look at its arguments."""
        if name == "sorted":
            return len(values[0]).bit_length()
        return 25 if name == "str" else 1


def rounded(number: Any, digits: Any = None) -> Any:
    """Return a number rounded to some digits.

    Raises:
        RuleLimitError: so many digits are not allowed.
        RuleTypeError: it is not a whole number.
    """
    if digits is not None and type(digits) not in WHOLE:
        raise RuleTypeError(f"{INCORRECT}: round takes a whole number of digits, got {shortened(digits)}.")
    if digits is not None and abs(digits) > MAX_DIGITS:
        raise RuleLimitError(f"round takes at most {MAX_DIGITS} digits, got {digits}.")
    return round(number, digits)


def added(numbers: Any, start: Any = 0) -> Any:
    """Return the sum of numbers.

    Raises:
        RuleTypeError: they are none.
    """
    if type(start) not in NUMBERS:  # lists could be added, too, in quadratic time
        raise RuleTypeError(f"{INCORRECT}: sum starts with a number, got {shortened(start)}.")
    return sum(numbers, start)
