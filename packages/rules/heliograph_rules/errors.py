"""Errors of rule files and rules, and `show` for the values in their messages."""

from __future__ import annotations

from reprlib import Repr
from typing import Any, Self


class RuleError(ValueError):
    """A rule file, or a rule in it, is invalid.

    Args:
        problem: the problem and how to fix it.
        column: the column in the text of the rule, from 1.
        controller: the name of the controller.
        file: the rule file.
        line: the line in that file, from 1.
    """

    def __init__(
        self,
        problem: str,
        *,
        column: int | None = None,
        controller: str | None = None,
        file: str | None = None,
        line: int | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.column = column
        self.controller = controller
        self.file = file
        self.line = line

    def __str__(self) -> str:
        rule = "the rule" if self.controller is None else "its rule"
        places = [
            self.file,
            None if self.line is None else f"line {self.line}",
            None if self.controller is None else f"controller {self.controller!r}",
            None if self.column is None else f"column {self.column} of {rule}",
        ]
        location = ", ".join(place for place in places if place is not None)
        return f"{location}: {self.problem}" if location else self.problem

    def located(self, *, file: str | None = None, line: int | None = None, controller: str | None = None) -> Self:
        self.file, self.line, self.controller = file or self.file, line or self.line, controller or self.controller
        return self


class RuleSyntaxError(RuleError):
    """The text of a rule is not in the language of rules."""


class RuleNameError(RuleError, NameError):
    """A rule uses a variable or a function that does not exist."""


class RuleTypeError(RuleError, TypeError):
    """A rule, or a value in it, has an invalid type."""


class RuleKeyError(RuleError, KeyError):
    """A rule file names a trigger, metric class, operation or action that does not exist."""


class RuleLimitError(RuleError):
    """A rule is too large, or its evaluation takes too long."""


class RuleEvaluationError(RuleError):
    """A rule failed during its evaluation, for example on a missing key; see `__cause__`."""


class MetricUnavailable(Exception):  # noqa: N818  # no error: the rule is skipped
    """A rule needs a metric that has no value yet; the argument is its name."""

    def __str__(self) -> str:
        return f"not available yet: {self.args[0]}"


_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 100
_REPR.maxlevel = 3  # keeps a message short for any content of a file


def show(value: Any) -> str:
    return _REPR.repr(value)
