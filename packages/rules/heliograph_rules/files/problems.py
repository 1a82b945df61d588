"""What is wrong with a rule file: the first of it, or all."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..errors import RuleError

P = ParamSpec("P")
T = TypeVar("T")


class Problems:
    """Collects the errors of the parts of a file.

    Args:
        keeps: whether errors are collected, so that the next part is looked at too; else the first one leaves.

    Attributes:
        found: the errors.
        broken: the names of metrics and operations that were left out for theirs: what uses them is not to blame.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self.found: list[RuleError] = []
        self.broken: set[str] = set()
        self._keeps = keeps

    def attempt(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what a function returns; None where it adds an error, or raises one, and errors are kept."""
        before = len(self.found)
        try:
            made = function(*args, **kwargs)
        except RuleError as error:
            self.add(error)
        return made if len(self.found) == before else None

    def add(self, error: RuleError) -> None:
        """Keep an error, or raise it."""
        if not self._keeps:
            raise error
        self.found.append(error)
