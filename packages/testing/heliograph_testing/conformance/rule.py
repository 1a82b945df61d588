"""A rule for plugins: a check, the sentence that it checks, and how to mend a plugin that breaks it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from heliograph.spi import describe_error

from .subject import Subject


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        name: of the rule.
        sentence: what the rule demands.
        mend: how to mend a plugin that breaks it.
        check: raises AssertionError with what it found where a plugin breaks the rule.
    """

    name: str
    sentence: str
    mend: str
    check: Callable[[Subject], None]

    def apply(self, subject: Subject) -> None:
        """Check a plugin.

        Raises:
            AssertionError: the rule is broken: says which rule it is, what was found, and how to mend it.
        """
        try:
            self.check(subject)
        except Exception as error:
            found = str(error) if isinstance(error, AssertionError) else f"It raised {describe_error(error)}"
            raise AssertionError(
                f"{subject.title} breaks the rule {self.name}: {self.sentence}\nFound: {found}\nTo mend it: {self.mend}"
            ) from error


def rule(mend: str) -> Callable[[Callable[[Subject], None]], Rule]:
    """Make a rule of a function, whose docstring is the rule's sentence.

    Args:
        mend: a sentence that says how to mend a plugin that breaks it.
    """

    def make(check: Callable[[Subject], None]) -> Rule:
        return Rule(check.__name__, " ".join((inspect.getdoc(check) or "").split()), mend, check)

    return make
