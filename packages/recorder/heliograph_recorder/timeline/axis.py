"""The time axis of a page: the attempts end to end, with a narrow gap between them, however long the real one was."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ..explain.attempt_summary import AttemptSummary

GAP = 0.015  # of the total


class Axis:
    """Converts a moment of an attempt to seconds on the axis.

    Args:
        attempts: of the recording.

    Attributes:
        gap: the width of a gap, in seconds of the axis.
        starts: where each attempt begins.
        end: where the last one ends.
    """

    def __init__(self, attempts: Sequence[AttemptSummary]) -> None:
        total = sum(attempt.seconds for attempt in attempts)
        self.gap = GAP * total if len(attempts) > 1 else 0.0
        self.starts = list(accumulate((attempt.seconds + self.gap for attempt in attempts[:-1]), initial=0.0))
        self.end = self.starts[-1] + attempts[-1].seconds

    def at(self, attempt: int, clock: float) -> float:
        """Return a moment on the axis.

        Args:
            attempt: its number, from 1.
            clock: seconds since it began.
        """
        return round(self.starts[attempt - 1] + clock, 6)
