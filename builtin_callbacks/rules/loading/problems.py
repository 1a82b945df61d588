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
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self.found: list[RuleError] = []
        self._keeps = keeps

    def attempt(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what a function returns; None where it fails and errors are kept."""
        try:
            return function(*args, **kwargs)
        except RuleError as error:
            if not self._keeps:
                raise
            self.found.append(error)
            return None
