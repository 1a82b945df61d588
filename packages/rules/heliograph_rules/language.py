"""The language of rules: Python expressions that read metrics, evaluated by simpleeval."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from random import Random
from reprlib import repr as shortened
from typing import Any, Final, NoReturn

from heliograph.spi import known_names, with_article
from simpleeval import DEFAULT_OPERATORS, EvalWithCompoundTypes, IterableTooLong, NumberTooHigh

from .errors import (
    MetricUnavailable,
    RuleError,
    RuleEvaluationError,
    RuleLimitError,
    RuleNameError,
    RuleSyntaxError,
    RuleTypeError,
    show,
)

INCORRECT: Final = "Rule failed due to incorrect type usage"
MAX_BITS = 4_096  # of a power of integers
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (abs, all, any, len, max, min, round, sorted, sum)},
    **{kind.__name__: kind for kind in (dict, float, int, list, set, str, tuple)},
    **{f"math_{function.__name__}": function for function in (math.ceil, math.floor, math.sqrt, math.trunc)},
}
FUNCTION_NAMES = frozenset({*FUNCTIONS, "rand", "randint"})
REFUSED: Mapping[type[ast.AST], str] = {
    ast.Lambda: "lambda",
    ast.NamedExpr: "an assignment (:=)",
    ast.Starred: "unpacking with *",
    ast.Await: "await",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
}
CONSTANTS = {"true": "True", "false": "False", "none": "None", "null": "None"}  # spellings of YAML and JSON


class Rule:
    """A checked rule.

    `rand` and `randint` return numbers that depend only on the text of the rule and on the number of previous draws.
    They do not change the random generators of the training, and are equal on all ranks. Save `state_dict` so that a
    resumed run continues with the next number.

    Args:
        text: an expression that is true or false, for example `loss["loss"] < 1.0`.
        names: the metrics that it may read.

    Raises:
        RuleError: the rule is invalid; its subclass tells the kind of error, and `column` the place.

    Attributes:
        text: the expression.
        names: the metrics that it reads.
        draws: the number of random numbers drawn.
    """

    def __init__(self, text: str, names: Collection[str]) -> None:
        self.text = text
        self.draws = 0
        stripped = text.strip()
        self._indent = len(text) - len(text.lstrip())  # the parser rejects indentation
        self._lines = stripped.splitlines(keepends=True)
        if "__" in text:
            raise RuleSyntaxError("A rule must not contain a double underscore (__).", column=text.find("__") + 1)
        if not stripped:
            raise RuleSyntaxError("The rule is empty: write an expression that is true or false.")
        checker = Checker(self, names)
        try:
            with warnings.catch_warnings():  # for example about an unknown escape
                warnings.simplefilter("ignore")
                self._tree = ast.parse(stripped, mode="eval").body
            checker.visit(self._tree)
        except SyntaxError as error:
            column = self._place(error.lineno or 1, (error.offset or len(stripped) + 1) - 1)  # None means the end
            raise RuleSyntaxError(
                f"{error.msg}. A rule is one expression without assignments.", column=column
            ) from None
        except (RecursionError, MemoryError):  # the parser raises MemoryError
            raise RuleLimitError("The rule is nested too deeply to parse.") from None
        self.names = frozenset(checker.read)
        self._compared_with_none = checker.compared_with_none

    def evaluate(self, values: Mapping[str, Any]) -> bool:
        """Return whether the rule is true.

        Args:
            values: the values of the metrics by name; a value that is None or missing is not available yet.

        Raises:
            MetricUnavailable: the rule needs a metric that is not available.
            RuleTypeError: a value has an invalid type, or the rule is neither true nor false.
            RuleLimitError: a value becomes too large.
            RuleEvaluationError: another error; its cause is Python's own error, for example a KeyError.
        """
        names = {name: values.get(name) for name in self.names}
        evaluator = Evaluator(names, self._draw, self._compared_with_none)
        try:
            result = evaluator.eval(self.text, self._tree)
            if type(result) is not bool:
                raise TypeError(f"the rule must return a bool, got {type(result).__name__}: {shortened(result)}")
        except MetricUnavailable:
            raise
        except TypeError as error:
            hint = " Read a dict by key: metric.key." if "'dict'" in str(error) else ""
            segment = ast.get_source_segment("".join(self._lines), evaluator.node or self._tree) or self.text
            text = f"{INCORRECT}: {error!s:.200}.{hint} The expression is {show(' '.join(segment.split()))}."
            raise RuleTypeError(text, column=self._column_of(evaluator)) from error
        except (IterableTooLong, NumberTooHigh, RecursionError, MemoryError) as error:
            text = f"A value is too large or nested too deeply: {error}"
            raise RuleLimitError(text, column=self._column_of(evaluator)) from error
        except Exception as error:
            text = f"The rule failed: {type(error).__name__}: {error.args[0] if error.args else error!s:.400}"
            raise RuleEvaluationError(text, column=self._column_of(evaluator)) from error
        return result

    def state_dict(self) -> dict[str, int]:
        return {"draws": self.draws}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.draws = state["draws"]

    def column(self, node: Any) -> int:
        line = self._lines[node.lineno - 1].encode()[: node.col_offset]  # Python counts bytes
        return self._place(node.lineno, len(line.decode()))

    def _column_of(self, evaluator: Evaluator) -> int | None:
        return None if evaluator.node is None else self.column(evaluator.node)

    def _place(self, line: int, offset: int) -> int:
        return min(self._indent + sum(map(len, self._lines[: line - 1])) + offset, len(self.text)) + 1

    def _draw(self) -> float:
        self.draws += 1
        return Random(f"{self.draws} {self.text}").random()  # noqa: S311  # not a secret


class Checker(ast.NodeVisitor):
    """Checks the names and the syntax of a rule; `read` collects the metrics that it reads."""

    def __init__(self, rule: Rule, names: Collection[str]) -> None:
        self.rule, self.names = rule, names
        self.read = set[str]()
        self.compared_with_none = set[ast.AST]()
        self._locals = frozenset[str]()

    def visit(self, node: ast.AST) -> None:
        if type(node) in REFUSED:
            self._fail(node, RuleSyntaxError, f"The language of rules does not have {REFUSED[type(node)]}.")
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            self._check_comprehension(node)
        else:
            super().visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._locals:
            return
        if node.id not in self.names:
            function = " It is a function: call it." if node.id in FUNCTION_NAMES else ""
            hint = f" Did you mean {CONSTANTS[node.id]}?" if node.id in CONSTANTS else known_names(node.id, self.names)
            self._fail(node, RuleNameError, f"Unknown variable {node.id!r}.{function}{hint}")
        self.read.add(node.id)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = node.left, *node.comparators
        is_equality = all(isinstance(operator, ast.Eq | ast.NotEq | ast.Is | ast.IsNot) for operator in node.ops)
        if is_equality and any(isinstance(side, ast.Constant) and side.value is None for side in sides):
            self.compared_with_none.update(sides)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not isinstance(node.func, ast.Name):
            self._fail(node, RuleSyntaxError, "Only functions can be called, by name: rules have no methods.")
        name = node.func.id
        if name not in FUNCTION_NAMES:
            metric = " It is a variable." if name in self.names else ""
            problem = f"Unknown function {name!r}: it is not defined.{metric}{known_names(name, FUNCTION_NAMES)}"
            self._fail(node, RuleNameError, problem)
        for part in (*node.args, *node.keywords):
            self.visit(part)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        if node.conversion != -1:
            self._fail(node, RuleSyntaxError, "The language of rules does not have the conversions !r, !s and !a.")
        self.generic_visit(node)

    def _check_comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        outer = self._locals
        for part in node.generators:
            targets = [target for target in ast.walk(part.target) if isinstance(target, ast.expr)]
            if part.is_async or not all(isinstance(target, ast.Name | ast.Tuple | ast.List) for target in targets):
                self._fail(node, RuleSyntaxError, "A comprehension may assign only to names, and has no async.")
            self.visit(part.iter)
            self._locals |= {target.id for target in targets if isinstance(target, ast.Name)}
            for test in part.ifs:
                self.visit(test)
        for result in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(result)
        self._locals = outer

    def _fail(self, node: ast.AST, kind: type[RuleError], problem: str) -> NoReturn:
        raise kind(problem, column=self.rule.column(node))


class Evaluator(EvalWithCompoundTypes):  # type: ignore[misc]  # it has no types
    """Evaluates the syntax tree of one rule once; an error leaves `node` at the failing node."""

    def __init__(
        self, names: Mapping[str, Any], draw: Callable[[], float], compared_with_none: Collection[ast.AST]
    ) -> None:
        functions = {**FUNCTIONS, "rand": draw, "randint": lambda top: int(draw() * top)}
        operators = {
            **DEFAULT_OPERATORS,
            ast.Pow: power,
            ast.Is: is_same,
            ast.IsNot: lambda left, right: not is_same(left, right),
        }
        super().__init__(operators, functions, names)
        self.nodes[ast.SetComp] = lambda node: set(self._eval_comprehension(node))
        self.node: ast.AST | None = None
        self._compared_with_none = compared_with_none

    def _eval_name(self, node: ast.Name) -> Any:
        value = super()._eval_name(node)
        if value is None and node.id in self.names and node not in self._compared_with_none:
            raise MetricUnavailable(node.id)
        return value

    def _eval(self, node: ast.AST) -> Any:
        outer, self.node = self.node, node
        value = self.nodes[type(node)](node)
        if hasattr(value, "ndim") and hasattr(value, "item"):
            value = scalar(value)
        self.node = outer
        return value

    def _eval_subscript(self, node: ast.Subscript) -> Any:
        return item(self._eval(node.value), self._eval(node.slice))

    def _eval_attribute(self, node: ast.Attribute) -> Any:
        container = self._eval(node.value)
        if not isinstance(container, Mapping):  # never an attribute of an object
            raise TypeError(f"only a dict has keys like {node.attr!r}, got {shortened(container)}")
        return item(container, node.attr)

    def _eval_formattedvalue(self, node: ast.FormattedValue) -> str:
        return format(self._eval(node.value), "" if node.format_spec is None else self._eval(node.format_spec))


def item(container: Any, key: Any) -> Any:
    if isinstance(container, Mapping) and key not in container:
        raise KeyError(f"there is no key {key!r:.80}.{known_names(str(key), [*map(str, container)])}")
    return container[key]


def power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_BITS:
        raise NumberTooHigh(f"a power of integers may have at most {MAX_BITS} bits")
    return base**exponent


def is_same(left: Any, right: Any) -> bool:
    return bool(left == right) if left is None or right is None else left is right


def scalar(value: Any) -> Any:
    try:
        return value.item()
    except (RuntimeError, ValueError):  # of torch, of NumPy
        shape = tuple(value.shape)
        raise TypeError(
            f"a metric's value contains {with_article(type(value).__name__)} of shape {shape}: only tensors and arrays "
            f"of one element are numbers"
        ) from None
