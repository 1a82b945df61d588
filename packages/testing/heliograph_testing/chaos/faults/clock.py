"""A clock of the system that is put forward or back."""

from __future__ import annotations

import time

from .replacements import Replacements


class Clock:
    """`time.time` and `time.time_ns`, with jumps; `time.monotonic` cannot jump, and files have the system's times."""

    def __init__(self) -> None:
        self.offset = 0.0
        now, now_ns = time.time, time.time_ns
        doubles = {now: lambda: now() + self.offset, now_ns: lambda: now_ns() + int(self.offset * 1e9)}
        self._replacements = Replacements(doubles)
        self._is_in_place = False

    def jump(self, seconds: float) -> None:
        """Put the clock forward, or back by negative seconds."""
        self.offset += seconds
        if not self._is_in_place:
            self._is_in_place = True
            self._replacements.apply()

    def close(self) -> None:
        """Put the clock right."""
        self._replacements.undo()
        self.offset, self._is_in_place = 0.0, False
