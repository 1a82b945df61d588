"""A mapping of a rule file, whose keys are checked one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from ....events.checks import known_names
from ..errors import RuleError, RuleKeyError, RuleTypeError
from ..showing import shown
from .document import Document


class Section:
    """A mapping of a rule file.

    Args:
        document: what it is part of.
        value: the mapping.
        what: what to call it in errors.
        keys: those that it may have.
        controller: whose it is.

    Raises:
        RuleTypeError: it is no mapping.
        RuleKeyError: it has a key that it may not have.
    """

    def __init__(
        self, document: Document, value: Any, what: str, keys: Collection[str], controller: str | None = None
    ) -> None:
        self.document, self.value, self.what, self.controller = document, value, what, controller
        if not isinstance(value, Mapping):
            self.fail(f"{what} is a mapping with the keys {', '.join(keys)}, got {shown(value)}.", kind=RuleTypeError)
        for key in value:
            if key not in keys:
                self.fail(f"{what} has no key {key!r}.{known_names(str(key), keys)}", key, RuleKeyError)

    def __contains__(self, key: str) -> bool:
        return key in self.value

    def line(self, key: Any = None) -> int | None:
        """Return the line of a key, or of the section."""
        return self.document.line(self.value, key) or self.document.line(self.value)

    def fail(self, problem: str, key: Any = None, kind: type[RuleError] = RuleError) -> NoReturn:
        """Raise an error about a key, or about the section."""
        raise kind(problem, file=self.document.file, line=self.line(key), controller=self.controller)

    def needed(self, key: str) -> Any:
        """Return the value of a key that must be there."""
        if key not in self:
            self.fail(f"{self.what} lacks the key {key!r}.", kind=RuleKeyError)
        return self.value[key]

    def text(self, key: str) -> str:
        """Return the text of a key that must be there."""
        value = self.needed(key)
        if not isinstance(value, str) or not value.strip():
            self.fail(f"{key!r} of {self.what} is text, got {shown(value)}.", key, RuleTypeError)
        return value

    def word(self, key: str, allowed: Collection[str], default: str | None = None) -> str | None:
        """Return the word of a key, one of those allowed."""
        if key not in self:
            return default
        if (word := self.text(key)) not in allowed:
            self.fail(f"{key!r} of {self.what} is one of {', '.join(allowed)}, got {word!r}.", key)
        return word

    def texts(self, key: str, example: str) -> list[str]:
        """Return the list of texts of a key, which must be there and hold at least one."""
        value = self.needed(key)
        if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) for each in value):
            problem = f"{key!r} of {self.what} is a list of names, such as [{example}], got {shown(value)}."
            self.fail(problem, key, RuleTypeError)
        for index, each in enumerate(value):
            if each in value[:index]:
                self.fail(f"{key!r} of {self.what} names {each!r} twice.", key)
        return list(value)

    def items(self, key: str) -> list[Any]:
        """Return the list of a key; an empty one where the key is missing, or nothing stands behind it."""
        value = self.value.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            self.fail(f"{key!r} is a list, got {shown(value)}.", key, RuleTypeError)
        return list(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return the mapping of names to values of a key; an empty one where nothing is there."""
        value = self.value.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            problem = f"{key!r} of {self.what} is a mapping of names to values, got {shown(value)}."
            self.fail(problem, key, RuleTypeError)
        return value
