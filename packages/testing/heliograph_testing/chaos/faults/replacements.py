"""Functions of the standard library, replaced in every module that has imported them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


class Replacements:
    """Doubles of functions and classes, put in place of the originals in all loaded modules.

    Args:
        doubles: by the originals.
    """

    def __init__(self, doubles: Mapping[Any, Any]) -> None:
        self._doubles = {id(original): (original, double) for original, double in doubles.items()}
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    def apply(self) -> None:
        """Put the doubles in place."""
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict):  # something else can lie in sys.modules
                continue
            for name, value in list(names.items()):
                if id(value) in self._doubles:
                    self._replaced.append((names, name, value))
                    names[name] = self._doubles[id(value)][1]

    def undo(self) -> None:
        """Put the originals back."""
        while self._replaced:
            names, name, original = self._replaced.pop()
            names[name] = original
