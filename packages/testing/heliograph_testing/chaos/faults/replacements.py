"""Replaces functions of the standard library in all loaded modules; a clock that jumps."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any


class Replacements:
    """Replaces functions and classes by doubles in every loaded module."""

    def __init__(self, doubles: Mapping[Any, Any]) -> None:
        self._doubles = {id(original): (original, double) for original, double in doubles.items()}
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    def apply(self) -> None:
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict):  # sys.modules may contain any object
                continue
            for name, value in list(names.items()):
                if id(value) in self._doubles:
                    self._replaced.append((names, name, value))
                    names[name] = self._doubles[id(value)][1]

    def undo(self) -> None:
        while self._replaced:
            names, name, original = self._replaced.pop()
            names[name] = original


class JumpingClock:
    """Jumps of `time.time` and `time.time_ns`; `time.monotonic` and file times do not change."""

    def __init__(self) -> None:
        self.offset = 0.0
        now, now_ns = time.time, time.time_ns
        doubles = {now: lambda: now() + self.offset, now_ns: lambda: now_ns() + int(self.offset * 1e9)}
        self._replacements = Replacements(doubles)
        self._is_in_place = False

    def jump(self, seconds: float) -> None:
        self.offset += seconds
        if not self._is_in_place:
            self._is_in_place = True
            self._replacements.apply()

    def close(self) -> None:
        self._replacements.undo()
        self.offset, self._is_in_place = 0.0, False
