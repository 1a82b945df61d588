"""Values in sentences."""

from __future__ import annotations

from collections.abc import Iterable
from reprlib import Repr
from typing import Any, Self


class RuleError(ValueError):
    """A rule file, or a rule in it, is wrong.

    Args:
        problem: what is wrong, and how to mend it.
        column: where in the rule's text, from 1.
        controller: whose rule it is.
        file: the file that it is in.
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
        of_what = "its rule" if self.controller is not None else "the rule"
        places = [
            self.file,
            None if self.line is None else f"line {self.line}",
            None if self.controller is None else f"controller {self.controller!r}",
            None if self.column is None else f"column {self.column} of {of_what}",
        ]
        known = ", ".join(place for place in places if place is not None)
        return f"{known}: {self.problem}" if known else self.problem

    def located(self, *, file: str | None = None, line: int | None = None, controller: str | None = None) -> Self:
        """Return a copy, with its cause, that also says these; what is None stays as it was."""
        copy = type(self)(
            self.problem,
            column=self.column,
            controller=self.controller if controller is None else controller,
            file=self.file if file is None else file,
            line=self.line if line is None else line,
        )
        copy.__cause__ = self.__cause__
        return copy


class RuleSyntaxError(RuleError):
    """A rule's text is not in the language of rules."""


class RuleNameError(RuleError, NameError):
    """A rule reads a variable, or calls a function, that does not exist."""


class RuleTypeError(RuleError, TypeError):
    """A rule, or something in it, has a type that cannot be."""


class RuleKeyError(RuleError, KeyError):
    """A rule file names a trigger, a metric class, an operation or an action that does not exist."""


class RuleLimitError(RuleError):
    """A rule is too large, or would take too long."""


class RuleEvaluationError(RuleError):
    """A rule failed while it was evaluated, as on a missing key; Python's own error is the `__cause__`."""


class MetricUnavailable(Exception):  # noqa: N818  # no error: the rule is skipped
    """A rule needs metrics that have no value yet.

    Attributes:
        names: theirs, sorted.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(sorted(names))
        super().__init__(self.names)  # as given, so that it can be pickled

    def __str__(self) -> str:
        return f"not available yet: {', '.join(self.names)}"


class _Repr(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100
        self.maxlevel = 3  # six items of six items of six: a sentence stays one, whatever a file holds

    def repr_int(self, value: int, level: int) -> str:
        try:
            return super().repr_int(value, level)
        except ValueError:  # Python writes no number of so many digits
            return f"<a whole number of {value.bit_length()} bits>"


_REPR = _Repr()


def show(value: Any) -> str:
    """Return a value as Python writes it, shortened where it is long."""
    return _REPR.repr(value)
