"""The time axis of a page: the attempts laid end to end, a narrow gap between them however long they lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ..explain.attempt_summary import Leg

GAP = 0.015  # of the whole


class Axis:
    """Puts a moment of an attempt on the axis.

    Args:
        found: the attempts.

    Attributes:
        gap: how wide a gap is, in seconds of the axis.
        starts: where each attempt begins.
        end: where the last one ends.
    """

    def __init__(self, found: Sequence[Leg]) -> None:
        total = sum(leg.seconds for leg in found)
        self.gap = GAP * total if len(found) > 1 else 0.0
        self.starts = list(accumulate((leg.seconds + self.gap for leg in found[:-1]), initial=0.0))
        self.end = self.starts[-1] + found[-1].seconds

    def at(self, leg: int, clock: float) -> float:
        """Return the place of a moment.

        Args:
            leg: the attempt's number, from 1.
            clock: seconds since it began.
        """
        return round(self.starts[leg - 1] + clock, 6)
