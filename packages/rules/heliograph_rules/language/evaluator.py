"""Evaluates rules: simpleeval's evaluator with our values, operators, functions and limits."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from reprlib import repr as shortened
from typing import Any

from simpleeval import EvalWithCompoundTypes

from ..errors import RuleEvaluationError, RuleLimitError, RuleTypeError
from .kinds import NUMBERS, SIGNATURES, WHOLE, name_kinds
from .limits import MAX_DIGITS, NODE, WORK, Budget, check_format, check_length
from .operators import Operators
from .values import INCORRECT, Container, Unavailable, ValueReader, admit, describe


class Functions:
    """The functions of the language, on plain values and within the limits."""

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
            "round": round_number,
            "set": self.to_set,
            "sorted": sorted,
            "str": str,
            "sum": sum_numbers,
            "tuple": tuple,
        }

    def table(self) -> dict[str, Callable[..., Any]]:
        return {"len": self.reader.size, **{name: partial(self.call, name) for name in self.plain}}

    def call(self, name: str, *arguments: Any) -> Any:
        before = self.reader.budget.remaining
        values = [self.reader.plain(argument) for argument in arguments]
        weight = before - self.reader.budget.remaining
        allowed = SIGNATURES[name].first_types(len(values))
        if values and type(values[0]) not in allowed:
            raise RuleTypeError(f"{INCORRECT}: {name} takes {name_kinds(allowed)}, got {shortened(values[0])}.")
        self.reader.budget.charge(NODE + weight * self._factor(name, values))
        if name in ("list", "tuple") and values and type(values[0]) is set:
            values = [list(self.reader.items(values[0]))]
        return self.operators.checked(self.plain[name](*values))

    def rand(self) -> float:
        self.reader.budget.charge(100)
        return self.draw()

    def to_dict(self, pairs: Any = ()) -> dict[Any, Any]:
        return {self.reader.key(key): value for key, value in (pairs.items() if type(pairs) is dict else pairs)}

    def to_set(self, values: Any = ()) -> set[Any]:
        return {self.reader.key(value) for value in values}

    def _factor(self, name: str, values: list[Any]) -> int:
        # The work of the function per unit of work to read its arguments.
        if name == "sorted":
            return len(values[0]).bit_length()
        return 25 if name == "str" else 1


def round_number(number: Any, digits: Any = None) -> Any:
    if digits is not None and type(digits) not in WHOLE:
        raise RuleTypeError(f"{INCORRECT}: round takes an integer number of digits, got {shortened(digits)}.")
    if digits is not None and abs(digits) > MAX_DIGITS:
        raise RuleLimitError(f"round takes at most {MAX_DIGITS} digits, got {digits}.")
    return round(number, digits)


def sum_numbers(numbers: Any, start: Any = 0) -> Any:
    if type(start) not in NUMBERS:  # lists would take quadratic time
        raise RuleTypeError(f"{INCORRECT}: sum starts with a number, got {shortened(start)}.")
    return sum(numbers, start)


NO_CONVERSION = -1
CONVERSIONS: dict[int, Callable[[object], str]] = {ord("s"): str, ord("r"): repr, ord("a"): ascii}


class Evaluator(EvalWithCompoundTypes):  # type: ignore[misc]  # it has no types
    """Evaluates the syntax tree of one rule; `draw` returns a random number in [0, 1)."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.budget = Budget()
        self.reader = ValueReader(self.budget)
        self.checks = Operators(self.reader)
        super().__init__(operators=self.checks.table(), names={})
        self.functions = Functions(self.checks, draw).table()
        self.nodes[ast.SetComp] = self._eval_comprehension
        self.node: ast.AST | None = None

    def result(self, tree: ast.expr, values: Mapping[str, Any]) -> Any:
        self.budget.remaining = WORK
        self.names, self.locals, self.node = values, dict[str, Any](), None
        try:
            return self.reader.plain(self._eval(tree))
        finally:
            self.names = {}  # release the values

    def _eval(self, node: ast.AST) -> Any:
        outer, self.node = self.node, node
        self.budget.charge(NODE)
        value = self.nodes[type(node)](node)
        self.node = outer  # an error leaves it at the failing node
        return value

    def _eval_name(self, node: ast.Name) -> Any:
        if node.id in self.locals:
            return self.locals[node.id]
        value = self.names.get(node.id)
        return Unavailable(node.id) if value is None else admit(value)

    def _eval_subscript(self, node: ast.Subscript) -> Any:
        return self.reader.at(self._eval(node.value), self._eval(node.slice))

    def _eval_attribute(self, node: ast.Attribute) -> Any:
        value = self._eval(node.value)
        if (
            type(value) is not Unavailable
            and not (type(value) is Container and value.base is dict)
            and type(value) is not dict
        ):
            raise RuleTypeError(f"{INCORRECT}: only a dict has keys like {node.attr!r}, got {describe(value)}.")
        return self.reader.at(value, node.attr)

    def _eval_dict(self, node: Any) -> dict[Any, Any]:
        pairs = zip(node.keys, node.values, strict=True)
        return {self.reader.key(self._eval(key)): self._eval(value) for key, value in pairs}

    def _eval_set(self, node: ast.Set) -> set[Any]:
        return {self.reader.key(self._eval(element)) for element in node.elts}

    def _eval_comprehension(self, node: Any) -> Any:
        rows = self._rows(node.generators)
        if isinstance(node, ast.DictComp):
            return {self.reader.key(self._eval(node.key)): self._eval(node.value) for _ in rows}
        if isinstance(node, ast.SetComp):
            return {self.reader.key(self._eval(node.elt)) for _ in rows}
        return [self._eval(node.elt) for _ in rows]

    def _rows(self, parts: list[ast.comprehension]) -> Iterator[None]:
        # Assigns the names of a comprehension for each combination of its loops.
        if not parts:
            yield
            return
        outer = self.locals
        for item in self.reader.items(self._eval(parts[0].iter)):
            self.locals = outer | dict(self._bind_names(parts[0].target, item))
            if all(self._eval(test) for test in parts[0].ifs):
                yield from self._rows(parts[1:])
        self.locals = outer

    def _bind_names(self, target: Any, value: Any) -> Iterator[tuple[str, Any]]:
        self.budget.charge(NODE)
        if isinstance(target, ast.Name):
            yield target.id, value
            return
        if self.reader.size(value) != len(target.elts):
            raise RuleEvaluationError(f"Cannot unpack {self.reader.size(value)} values into {len(target.elts)} names.")
        for element, part in zip(target.elts, self.reader.items(value), strict=True):
            yield from self._bind_names(element, part)

    def _eval_joinedstr(self, node: ast.JoinedStr) -> str:
        text = "".join([str(self._eval(part)) for part in node.values])
        check_length(len(text))
        self.budget.charge(len(text) // 8)
        return text

    def _eval_formattedvalue(self, node: ast.FormattedValue) -> str:
        value = self.reader.plain(self._eval(node.value))
        text = str(self.functions["str"](value))  # charges the work
        if node.conversion in CONVERSIONS:
            value = CONVERSIONS[node.conversion](value)
        if node.format_spec is None:
            return text if node.conversion == NO_CONVERSION else str(value)
        spec = self._eval(node.format_spec)
        check_format(spec)
        return format(value, spec)
