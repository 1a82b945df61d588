"""Time the parts of some batches of this process: never more than a thousandth of the time is spent on it."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

SPACING = 0.02  # seconds between the ends of two batches that are timed, at least; timing one takes about 10 µs
STRIDE = 7919  # a prime, so that the timed batches do not coincide with a period of the training


@dataclass(slots=True)
class Sums:
    """What was timed since the last stretch.

    Attributes:
        sampled: batches that were timed.
        batch, load, forward: their seconds; see `Measured`.
        validation, save: seconds in validations and saves.
        validations, saves: how many there were.
    """

    sampled: int = 0
    batch: float = 0.0
    load: float = 0.0
    forward: float = 0.0
    validation: float = 0.0
    save: float = 0.0
    validations: int = 0
    saves: int = 0


class StepClock:
    """The clock of this process.

    Attributes:
        sums: since they were taken.
        due: the number of steps from which on batches are looked at: first the end of one, then the one after it.
    """

    def __init__(self) -> None:
        self.sums, self.due = Sums(), 0
        self._ended: float | None = None  # when the batch before the timed one ended, or what followed it
        self._former = 0  # the number of that batch
        self._began: float | None = None  # the timed one
        self._load = self._forward = 0.0
        self._validation: float | None = None
        self._save: float | None = None

    def take(self) -> Sums:
        """Return the sums, and begin with zero."""
        sums, self.sums = self.sums, Sums()
        return sums

    def end_load(self) -> None:
        """The data of a batch are there."""
        now = perf_counter()
        self._began, self._load = now, 0.0 if self._ended is None else now - self._ended

    def end_forward(self) -> None:
        """The forward pass of a batch has ended."""
        if self._began is not None:
            self._forward = perf_counter() - self._began

    def end_batch(self, batches: int, steps: int) -> None:
        """A batch has ended: add it if it was timed, and decide which is timed next.

        Args:
            batches: how many have ended.
            steps: how many were taken.
        """
        now, sums, gap = perf_counter(), self.sums, 0
        if self._ended is not None and self._began is not None and batches == self._former + 1:
            period = self._load + now - self._began
            sums.sampled += 1
            sums.batch += period
            sums.load += self._load
            sums.forward += self._forward
            gap = int(SPACING / max(period, 1e-6))
            gap += sums.sampled * STRIDE % (gap // 2 + 1)
        self._began, self._ended, self._former = None, None if gap else now, batches
        self.due = steps + gap

    def restart_load(self) -> None:
        """Something else than the loader has taken time since the last batch."""
        if self._ended is not None:
            self._ended = perf_counter()

    def begin_validation(self) -> None:
        """A validation begins."""
        self._validation = perf_counter()

    def end_validation(self) -> None:
        """It has ended."""
        if self._validation is not None:
            self.sums.validation += perf_counter() - self._validation
            self.sums.validations += 1
            self._validation = None
        self.restart_load()

    def begin_save(self) -> None:
        """State is saved."""
        self._save = perf_counter()

    def end_save(self) -> None:
        """It is saved, or copied to be."""
        if self._save is not None:
            self.sums.save += perf_counter() - self._save
            self.sums.saves += 1
            self._save = None
        self.restart_load()
