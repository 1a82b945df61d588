"""Parses a rule and checks its syntax, names and limits before it is evaluated."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Collection
from typing import Any, NoReturn
from unicodedata import normalize

from heliograph.spi import known_names
from simpleeval import DISALLOW_METHODS, DISALLOW_PREFIXES

from ..errors import RuleError, RuleLimitError, RuleNameError, RuleSyntaxError, RuleTypeError
from .kinds import SIGNATURES
from .limits import MAX_DEPTH, MAX_TEXT, check_bits, check_format
from .values import INCORRECT, is_scalar

LINE_END = re.compile(r"\r\n|\r|\n")


class RuleText:
    """The text of a rule, with the columns of the nodes of its syntax tree."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise RuleTypeError(f"A rule must be text, for example 'loss[\"loss\"] < 1.0', got {text!r:.80}.")
        if len(text) > MAX_TEXT:
            raise RuleLimitError(f"The rule has {len(text)} characters, at most {MAX_TEXT} are allowed.")
        if "__" in normalize("NFKC", text):  # Python normalizes names: other characters become underscores
            column = text.find("__") + 1 or None
            raise RuleSyntaxError("A rule must not contain a double underscore (__).", column=column)
        self.text = text
        self._skipped = len(text) - len(text.lstrip())  # the parser rejects indentation
        self._lines = [0, *(line_end.end() for line_end in LINE_END.finditer(text.strip()))]

    def parse(self) -> ast.expr:
        stripped = self.text.strip()
        if not stripped:
            raise RuleSyntaxError("The rule is empty: write an expression that is true or false.")
        try:
            with warnings.catch_warnings():  # for example about an unknown escape
                warnings.simplefilter("ignore")
                return ast.parse(stripped, mode="eval").body
        except SyntaxError as error:
            problem = f"{error.msg}. A rule is one expression without assignments."
            offset = (error.offset or len(stripped) + 1) - 1  # 0 and None mean the end
            raise RuleSyntaxError(problem, column=self._place(error.lineno, offset)) from None
        except (RecursionError, MemoryError):  # the parser raises MemoryError
            raise RuleLimitError("The rule is nested too deeply to parse.") from None
        except ValueError as error:  # a null character or half a surrogate pair
            raise RuleSyntaxError(f"The rule cannot be parsed: {error}.") from None

    def column(self, node: Any) -> int:
        start = self._lines[min(node.lineno, len(self._lines)) - 1]
        line = self.text.strip()[start:].encode(errors="replace")[: node.col_offset]  # Python counts bytes
        return self._place(node.lineno, len(line.decode(errors="replace")))

    def segment(self, node: Any) -> str:
        return ast.get_source_segment(self.text.strip(), node) or self.text.strip()

    def _place(self, line: int | None, offset: int) -> int:
        start = self._lines[min(line or 1, len(self._lines)) - 1]
        return min(self._skipped + start + max(offset, 0), len(self.text)) + 1


REFUSED = {
    ast.Lambda: "lambda",
    ast.NamedExpr: "an assignment (:=)",
    ast.Starred: "unpacking with *",
    ast.Await: "await",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.Slice: "a slice outside [ ]",
    ast.GeneratorExp: "a generator that is not the only argument of a function",
}
CONSTANTS = {"true": "True", "false": "False", "none": "None", "null": "None"}  # spellings of YAML and JSON


class Checker:
    """Checks a syntax tree in one walk; `read` collects the metrics that it reads."""

    def __init__(self, source: RuleText, names: Collection[str]) -> None:
        self.source, self.names = source, names
        self.read = set[str]()
        self._locals = frozenset[str]()
        self._depth = 0
        composed = (ast.BoolOp, ast.Compare, ast.IfExp, ast.JoinedStr, ast.List, ast.Set, ast.Tuple, ast.UnaryOp)
        self._by_node: dict[type[ast.AST], Callable[[Any], None]] = {
            **dict.fromkeys(composed, self._check_parts),
            ast.Attribute: self._attribute,
            ast.BinOp: self._binary,
            ast.Call: self._call,
            ast.Constant: self._constant,
            ast.Dict: self._dict,
            ast.DictComp: lambda node: self._comprehension(node, node.key, node.value),
            ast.FormattedValue: self._format,
            ast.ListComp: lambda node: self._comprehension(node, node.elt),
            ast.Name: self._name,
            ast.SetComp: lambda node: self._comprehension(node, node.elt),
            ast.Subscript: self._subscript,
        }

    def check(self, node: ast.AST) -> None:
        handler = self._by_node.get(type(node))
        if handler is None:
            construct = REFUSED.get(type(node), type(node).__name__)
            self._fail(node, RuleSyntaxError, f"The language of rules does not have {construct}.")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(node, RuleLimitError, f"The rule is nested too deeply: at most {MAX_DEPTH} levels are allowed.")
        handler(node)
        self._depth -= 1

    def _fail(self, node: ast.AST, kind: type[RuleError], problem: str) -> NoReturn:
        raise kind(problem, column=self.source.column(node))

    def _try(self, node: ast.AST, check: Callable[[Any], None], value: object) -> None:
        try:
            check(value)
        except RuleError as error:
            self._fail(node, type(error), error.problem)

    def _check_parts(self, node: ast.AST) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self.check(part)

    def _constant(self, node: ast.Constant) -> None:
        if not is_scalar(type(node.value)):
            self._fail(node, RuleTypeError, f"{INCORRECT}: rules have no values like {node.value!r:.40}.")
        if type(node.value) is int:
            self._try(node, check_bits, node.value.bit_length())

    def _name(self, node: ast.Name) -> None:
        self._check_name(node, node.id)
        if node.id in self._locals:
            return
        if node.id not in self.names:
            function = " It is a function: call it." if node.id in SIGNATURES else ""
            hint = f" Did you mean {CONSTANTS[node.id]}?" if node.id in CONSTANTS else known_names(node.id, self.names)
            self._fail(node, RuleNameError, f"Unknown variable {node.id!r}.{function}{hint}")
        self.read.add(node.id)

    def _check_name(self, node: ast.AST, name: str) -> None:
        if name.startswith(tuple(DISALLOW_PREFIXES)) or name in DISALLOW_METHODS:
            self._fail(node, RuleNameError, f"The name {name!r} is not allowed in rules.")

    def _attribute(self, node: ast.Attribute) -> None:
        self._check_name(node, node.attr)
        self.check(node.value)

    def _subscript(self, node: ast.Subscript) -> None:
        self.check(node.value)
        if isinstance(node.slice, ast.Slice):
            self._check_parts(node.slice)
        else:
            self.check(node.slice)

    def _binary(self, node: ast.BinOp) -> None:
        self._check_parts(node)
        if isinstance(node.op, ast.MatMult):
            self._fail(node, RuleSyntaxError, "The language of rules does not have the operator @.")

    def _dict(self, node: ast.Dict) -> None:
        if None in node.keys:
            self._fail(node, RuleSyntaxError, "The language of rules does not have unpacking with **.")
        self._check_parts(node)

    def _format(self, node: ast.FormattedValue) -> None:
        self._check_parts(node)
        if node.format_spec is not None:
            parts = [getattr(part, "value", None) for part in getattr(node.format_spec, "values", [])]
            if all(isinstance(part, str) for part in parts):  # a nested spec is checked during the evaluation
                self._try(node, check_format, "".join(map(str, parts)))

    def _call(self, node: ast.Call) -> None:
        if not isinstance(node.func, ast.Name):
            self._fail(node, RuleSyntaxError, "Only functions can be called, by name: rules have no methods.")
        name = node.func.id
        if name not in SIGNATURES:
            metric = " It is a variable." if name in self.names else ""
            problem = f"Unknown function {name!r}: it is not defined.{metric}{known_names(name, SIGNATURES)}"
            self._fail(node, RuleNameError, problem)
        if node.keywords:
            self._fail(node, RuleSyntaxError, f"{name} takes no keyword arguments in rules.")
        signature, count = SIGNATURES[name], len(node.args)
        if not signature.allows(count):
            self._fail(node, RuleTypeError, f"{name} takes {signature.describe_counts()} arguments, got {count}.")
        for argument in node.args:
            if isinstance(argument, ast.GeneratorExp):
                self._comprehension(argument, argument.elt)
            else:
                self.check(argument)

    def _comprehension(self, node: Any, *results: ast.expr) -> None:
        outer = self._locals
        for part in node.generators:
            if part.is_async:
                self._fail(node, RuleSyntaxError, "The language of rules does not have async.")
            self.check(part.iter)
            self._bind(part.target)
            for test in part.ifs:
                self.check(test)
        for result in results:
            self.check(result)
        self._locals = outer

    def _bind(self, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._check_name(target, target.id)
            self._locals |= {target.id}
        elif isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self._bind(element)
        else:
            self._fail(target, RuleSyntaxError, "A comprehension may assign only to names.")
