"""What is wrong with a rule that can be seen before it is evaluated."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from itertools import product
from typing import Any, NoReturn

from heliograph.spi import known_names
from simpleeval import DISALLOW_METHODS, DISALLOW_PREFIXES

from ..errors import RuleError, RuleLimitError, RuleNameError, RuleSyntaxError, RuleTypeError
from .kinds import (
    ANY,
    ITERABLES,
    NEITHER,
    NONE,
    SEQUENCES,
    SIGNATURES,
    SYMBOLS,
    Kinds,
    binary_kinds,
    can_compare,
    name_kinds,
    unary_kinds,
)
from .limits import MAX_DEPTH, check_bits, check_format
from .parser import Source
from .values import INCORRECT

REFUSED = {
    ast.Lambda: "lambda",
    ast.NamedExpr: "an assignment (:=)",
    ast.Starred: "unpacking with *",
    ast.Await: "await",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.Slice: "a slice outside of [ ] alone",
    ast.GeneratorExp: "a generator that is not the only argument of a function",
}
CONSTANTS = {"true": "True", "false": "False", "none": "None", "null": "None"}  # of YAML and of others


class Checker:
    """Walks a rule's tree once, and works out the types that its pieces can have.

    Args:
        source: the rule's text.
        names: the metrics that it may read.
        kinds: the types of the values of some of them.

    Attributes:
        read: the metrics that it reads.
    """

    def __init__(self, source: Source, names: Collection[str], kinds: Mapping[str, type]) -> None:
        self.source, self.names, self._metric_kinds = source, names, kinds
        self.read = set[str]()
        self._locals = frozenset[str]()
        self._depth = 0
        self._by_node: dict[type[ast.AST], Callable[[Any], Kinds]] = {
            ast.Attribute: self._attribute,
            ast.BinOp: self._binary,
            ast.BoolOp: lambda node: self._union(node.values),
            ast.Call: self._call,
            ast.Compare: self._compare,
            ast.Constant: self._constant,
            ast.Dict: self._dict,
            ast.DictComp: lambda node: self._comprehension(node, dict, node.key, node.value),
            ast.FormattedValue: self._format,
            ast.IfExp: self._either,
            ast.JoinedStr: lambda node: self._literal(node.values, str),
            ast.List: lambda node: self._literal(node.elts, list),
            ast.ListComp: lambda node: self._comprehension(node, list, node.elt),
            ast.Name: self._name,
            ast.Set: lambda node: self._literal(node.elts, set),
            ast.SetComp: lambda node: self._comprehension(node, set, node.elt),
            ast.Subscript: self._subscript,
            ast.Tuple: lambda node: self._literal(node.elts, tuple),
            ast.UnaryOp: self._unary,
        }

    def check(self, tree: ast.expr) -> None:
        """Check a whole rule.

        Raises:
            RuleError: something in it is wrong, or it can never be true or false; has the column.
        """
        kinds = self.kinds(tree)
        if bool not in kinds:
            self._fail(tree, RuleTypeError, f"{INCORRECT}: the rule gives {name_kinds(kinds)}, and it must give bool.")

    def kinds(self, node: ast.AST) -> Kinds:
        """Return the types that a piece can have."""
        handler = self._by_node.get(type(node))
        if handler is None:
            what = REFUSED.get(type(node), f"this ({type(node).__name__})")
            self._fail(node, RuleSyntaxError, f"The language of rules does not have {what}.")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(node, RuleLimitError, f"The rule is nested too deeply: {MAX_DEPTH} levels are allowed.")
        found = handler(node)
        self._depth -= 1
        return found

    def _fail(self, node: ast.AST, kind: type[RuleError], problem: str) -> NoReturn:
        raise kind(problem, column=self.source.column(node))

    def _try(self, node: ast.AST, check: Callable[[Any], None], value: object) -> None:
        """Check a value in the rule."""
        try:
            check(value)
        except RuleError as error:
            self._fail(node, type(error), error.problem)

    def _union(self, nodes: Collection[ast.expr]) -> Kinds:
        return NEITHER.union(*[self.kinds(node) for node in nodes])

    def _literal(self, parts: Collection[ast.expr], kind: type) -> Kinds:
        self._union(parts)
        return frozenset({kind})

    def _constant(self, node: ast.Constant) -> Kinds:
        if type(node.value) not in ANY:
            self._fail(node, RuleTypeError, f"{INCORRECT}: rules have no values such as {node.value!r:.40}.")
        if type(node.value) is int:
            self._try(node, check_bits, node.value.bit_length())
        return frozenset({type(node.value)})

    def _name(self, node: ast.Name) -> Kinds:
        self._check_name(node, node.id)
        if node.id in self._locals:
            return ANY
        if node.id not in self.names:
            of_function = " It is a function: call it." if node.id in SIGNATURES else ""
            known = f" Did you mean {CONSTANTS[node.id]}?" if node.id in CONSTANTS else known_names(node.id, self.names)
            self._fail(node, RuleNameError, f"Unknown variable {node.id!r}.{of_function}{known}")
        self.read.add(node.id)
        return frozenset({self._metric_kinds[node.id]}) if node.id in self._metric_kinds else ANY

    def _check_name(self, node: ast.AST, name: str) -> None:
        if name.startswith(tuple(DISALLOW_PREFIXES)) or name in DISALLOW_METHODS:
            self._fail(node, RuleNameError, f"The name {name!r} is not allowed in rules.")

    def _attribute(self, node: ast.Attribute) -> Kinds:
        self._check_name(node, node.attr)
        kinds = self.kinds(node.value)
        if dict not in kinds:
            self._fail(node, RuleTypeError, f"{INCORRECT}: {name_kinds(kinds)} has no key {node.attr!r}.")
        return ANY

    def _subscript(self, node: ast.Subscript) -> Kinds:
        kinds = self.kinds(node.value)
        is_slice = isinstance(node.slice, ast.Slice)
        if not kinds & (SEQUENCES if is_slice else SEQUENCES | {dict}):
            self._fail(
                node,
                RuleTypeError,
                f"{INCORRECT}: {name_kinds(kinds)} has no {'slices' if is_slice else 'keys or indices'}.",
            )
        if not isinstance(node.slice, ast.Slice):
            self.kinds(node.slice)
            return ANY
        self._union([part for part in (node.slice.lower, node.slice.upper, node.slice.step) if part is not None])
        return kinds & SEQUENCES

    def _binary(self, node: ast.BinOp) -> Kinds:
        left, right = self.kinds(node.left), self.kinds(node.right)
        if isinstance(node.op, ast.MatMult):
            self._fail(node, RuleSyntaxError, "The language of rules does not have the operator @.")
        if self._may_be_unavailable(left, right):
            left = right = ANY
        kinds = NEITHER.union(*[binary_kinds(type(node.op), *types) for types in product(left, right)])
        if not kinds:
            self._fail(node, RuleTypeError, self._mismatch(node.op, left, right))
        return kinds

    def _unary(self, node: ast.UnaryOp) -> Kinds:
        operand = self.kinds(node.operand)
        kinds = NEITHER.union(*[unary_kinds(type(node.op), kind) for kind in operand])
        if not kinds:
            problem = f"{INCORRECT}: {SYMBOLS[type(node.op)]} of {name_kinds(operand)} has no meaning."
            self._fail(node, RuleTypeError, problem)
        return kinds

    def _compare(self, node: ast.Compare) -> Kinds:
        kinds = [self.kinds(each) for each in (node.left, *node.comparators)]
        for operator, left, right in zip(node.ops, kinds, kinds[1:], strict=False):
            can = any(can_compare(type(operator), *types) for types in product(left, right))
            if not can and not self._may_be_unavailable(left, right):
                self._fail(node, RuleTypeError, self._mismatch(operator, left, right))
        return frozenset({bool})

    def _may_be_unavailable(self, left: Kinds, right: Kinds) -> bool:
        """Whether None meets what may be a metric without a value: that must be able to say so."""
        return (left == ANY and NONE in right) or (right == ANY and NONE in left)

    def _mismatch(self, operator: ast.AST, left: Kinds, right: Kinds) -> str:
        problem = f"{INCORRECT}: {name_kinds(left)} {SYMBOLS[type(operator)]} {name_kinds(right)} has no meaning."
        return f"{problem} A dict is read by its keys, as in metric.key." if {dict} in (left, right) else problem

    def _either(self, node: ast.IfExp) -> Kinds:
        self.kinds(node.test)
        return self._union([node.body, node.orelse])

    def _dict(self, node: ast.Dict) -> Kinds:
        if None in node.keys:
            self._fail(node, RuleSyntaxError, "The language of rules does not have unpacking with **.")
        return self._literal([*(key for key in node.keys if key is not None), *node.values], dict)

    def _format(self, node: ast.FormattedValue) -> Kinds:
        self.kinds(node.value)
        if node.format_spec is not None:
            self.kinds(node.format_spec)
            parts = [getattr(part, "value", None) for part in getattr(node.format_spec, "values", [])]
            if all(isinstance(part, str) for part in parts):  # else it is worked out while the rule is evaluated
                self._try(node, check_format, "".join(map(str, parts)))
        return frozenset({str})

    def _call(self, node: ast.Call) -> Kinds:
        if not isinstance(node.func, ast.Name):
            self._fail(
                node, RuleSyntaxError, "Only functions are called, by their names: there are no methods in rules."
            )
        name = node.func.id
        if name not in SIGNATURES:
            of_metric = " It is a variable." if name in self.names else ""
            problem = f"Unknown function {name!r}: it is not defined.{of_metric}{known_names(name, SIGNATURES)}"
            self._fail(node, RuleNameError, problem)
        if node.keywords:
            self._fail(node, RuleSyntaxError, f"{name} takes no named arguments in rules.")
        signature, count = SIGNATURES[name], len(node.args)
        if not signature.allows(count):
            self._fail(node, RuleTypeError, f"{name} takes {signature.counts()} arguments, got {count}.")
        kinds = [self._argument(each) for each in node.args]
        taken = signature.taken(count)
        if kinds and not kinds[0] & taken:
            self._fail(
                node, RuleTypeError, f"{INCORRECT}: {name} takes {name_kinds(taken)}, got {name_kinds(kinds[0])}."
            )
        return signature.gives

    def _argument(self, node: ast.expr) -> Kinds:
        if isinstance(node, ast.GeneratorExp):
            return self._comprehension(node, list, node.elt)
        return self.kinds(node)

    def _comprehension(self, node: Any, kind: type, *results: ast.expr) -> Kinds:
        outer = self._locals
        for part in node.generators:
            if part.is_async:
                self._fail(node, RuleSyntaxError, "The language of rules does not have async.")
            kinds = self.kinds(part.iter)
            if not kinds & ITERABLES:
                self._fail(part.iter, RuleTypeError, f"{INCORRECT}: {name_kinds(kinds)} holds nothing to go through.")
            self._bind(part.target)
            self._union(part.ifs)
        self._union(results)
        self._locals = outer
        return frozenset({kind})

    def _bind(self, target: ast.expr) -> None:
        """Take in the names that a comprehension gives to what it goes through."""
        if isinstance(target, ast.Name):
            self._check_name(target, target.id)
            self._locals |= {target.id}
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._bind(each)
        else:
            self._fail(
                target, RuleSyntaxError, "A comprehension gives names to what it goes through, and nothing else."
            )
