"""A mapping of a rule file, whose keys are checked one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from heliograph.spi import known_names

from ..errors import RuleError, RuleKeyError, RuleTypeError
from ..text import show
from .document import Document
from .problems import Problems


class Section:
    """A mapping of a rule file; where errors are kept, a value that is wrong is an empty one.

    Args:
        document: what it is part of.
        problems: gets what is wrong.
        value: the mapping.
        what: what to call it in errors.
        keys: those that it may have.
        needed: those that it must have.
        controller: whose it is.
        line: where it is, for what is not a mapping.

    Raises:
        RuleTypeError: it is not a mapping.
        RuleKeyError: it has a key that it may not have, or lacks one.
    """

    def __init__(
        self,
        document: Document,
        problems: Problems,
        value: Any,
        what: str,
        keys: Collection[str],
        *,
        needed: Collection[str] = (),
        controller: str | None = None,
        line: int | None = None,
    ) -> None:
        self.document, self.value, self.what, self.controller = document, value, what, controller
        self.problems, self._line = problems, line
        if not isinstance(value, Mapping):
            problem = f"{what} is a mapping with the keys {', '.join(keys)}, got {show(value)}."
            raise self._error(problem, None, RuleTypeError)
        for key in value:
            if key not in keys:
                self.fail(f"{what} has no key {key!r}.{known_names(str(key), keys)}", key, RuleKeyError)
        if lacking := [repr(key) for key in needed if key not in value]:
            self.fail(f"{what} lacks the key{'s' * (len(lacking) > 1)} {', '.join(lacking)}.", kind=RuleKeyError)

    def __contains__(self, key: str) -> bool:
        return key in self.value

    def line(self, key: Any = None) -> int | None:
        """Return the line of a key, or of the section."""
        return self.document.line(self.value, key) or self.document.line(self.value) or self._line

    def fail(self, problem: str, key: Any = None, kind: type[RuleError] = RuleError) -> None:
        """Note an error about a key, or about the section."""
        self.problems.add(self._error(problem, key, kind))

    def text(self, key: str) -> str:
        """Return the text of a key."""
        value = self.value.get(key, "")
        if isinstance(value, str) and (value.strip() or key not in self):
            return value
        self.fail(f"{key!r} of {self.what} is text, got {show(value)}.", key, RuleTypeError)
        return ""

    def word(self, key: str, allowed: Collection[str], default: str | None = None) -> str | None:
        """Return the word of a key, one of those allowed."""
        if key not in self:
            return default
        if (word := self.text(key)) and word not in allowed:
            self.fail(f"{key!r} of {self.what} is one of {', '.join(allowed)}, got {word!r}.", key)
        return word

    def texts(self, key: str, example: str) -> list[str]:
        """Return the list of texts of a key, which must hold at least one."""
        if key not in self:
            return []
        value = self.value[key]
        if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) for each in value):
            problem = f"{key!r} of {self.what} is a list of names, such as [{example}], got {show(value)}."
            self.fail(problem, key, RuleTypeError)
            return []
        for index, each in enumerate(value):
            if each in value[:index]:
                self.fail(f"{key!r} of {self.what} names {each!r} twice.", key)
        return list(value)

    def items(self, key: str) -> list[tuple[Any, int | None]]:
        """Return what the list of a key holds, each with its line; nothing where the key has no value."""
        value = self.value.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            self.fail(f"{key!r} is a list, got {show(value)}.", key, RuleTypeError)
            return []
        return [(each, self.document.line(value, index)) for index, each in enumerate(value)]

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return the mapping of names to values of a key; an empty one where nothing is there."""
        value = self.value.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            problem = f"{key!r} of {self.what} is a mapping of names to values, got {show(value)}."
            self.fail(problem, key, RuleTypeError)
            return {}
        return value

    def _error(self, problem: str, key: Any, kind: type[RuleError]) -> RuleError:
        return kind(problem, file=self.document.file, line=self.line(key), controller=self.controller)
