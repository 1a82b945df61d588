"""The report of a resume check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from heliograph.events import Position
from heliograph.spi import Difference

from .moments import Moment


@dataclass(frozen=True, slots=True)
class InterruptedAttempt:
    """An attempt of the interrupted run.

    Attributes:
        resumed_at: finished epochs, batches of the epoch and steps; None if the attempt started from scratch.
        killed_at: the moment of the kill; None if the attempt ran to the end.
    """

    resumed_at: tuple[int, int, int] | None
    killed_at: Moment | None

    def __str__(self) -> str:
        begin = "from the start"
        if self.resumed_at is not None:
            begin = "resumed at epoch {}, batch {}, step {}".format(*self.resumed_at)
        return f"{begin}, {f'killed at {self.killed_at}' if self.killed_at else 'ran to the end'}"


@dataclass(frozen=True, slots=True)
class ResumeCheck:
    """The result of a resume check; `str` returns a report.

    Attributes:
        position: how the loader reaches its position, as in `result.resume`.
        reasons: reasons reported by the runs why a resume may differ.
        difference: the first difference; None if the runs are bitwise identical.
        causes: likely causes of the difference.
        is_deterministic: whether two uninterrupted runs are equal; if not, no run was killed.
        attempts: the attempts of the interrupted run, up to the first difference.
        batches: the number of batches in these attempts.
        draws: the first difference of the random state, even if nothing else differs.
        set_aside: the values that were not compared because they differ between uninterrupted runs.
    """

    position: Position
    reasons: tuple[str, ...]
    difference: Difference | None = None
    causes: tuple[str, ...] = ()
    is_deterministic: bool = True
    attempts: tuple[InterruptedAttempt, ...] = ()
    batches: int = 0
    draws: Difference | None = None
    set_aside: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the interrupted run equals the uninterrupted one."""
        return self.difference is None

    @property
    def kills(self) -> tuple[Moment, ...]:
        """The moments at which the run was killed."""
        return tuple(attempt.killed_at for attempt in self.attempts if attempt.killed_at is not None)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        count = len(self.attempts)
        if self.difference is None:
            yield f"exact: {self.batches} batches in {count} attempts equal an uninterrupted run"
        elif self.is_deterministic:
            yield f"NOT exact: attempt {count} differs from an uninterrupted run"
        else:
            yield "NOT deterministic: two uninterrupted runs differ, so a resume cannot be checked"
        yield from (f"  attempt {number}: {attempt}" for number, attempt in enumerate(self.attempts, 1))
        if self.draws is not None and self.difference is None:
            yield f"without consequence: {self.draws}"
        elif self.draws is not None:
            yield f"first {self.draws}"
        if self.difference is not None:
            yield f"{'then' if self.draws else 'first'} {self.difference}"
        yield from (f"likely cause: {cause}" for cause in self.causes)
        yield f"position of the data: {self.position}"
        yield from (reason for reason in self.reasons if reason not in self.causes)
        if self.set_aside:
            yield f"not compared, differs even without a kill: {', '.join(self.set_aside)}"
