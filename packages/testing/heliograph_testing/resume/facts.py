"""The facts by which two runs are compared, in order, each with its values down to the last bit."""

from __future__ import annotations

from dataclasses import dataclass

from heliograph.spi import Leaf


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a run did or had.

    Attributes:
        what: such as `batch`, `loss`, `metrics`, `modules`, `plugin early_stopping`.
        when: at which moment of the run, in words.
        counters: finished epochs, batches of the epoch (with the current one) and steps.
        leaves: the values by path.
    """

    what: str
    when: str
    counters: tuple[int, int, int]
    leaves: dict[str, Leaf]
