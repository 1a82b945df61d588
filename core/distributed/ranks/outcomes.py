"""What ranks do together: one works or each does, and all of them learn how it went."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from ....events import Engine
from ....events.errors import describe_error

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """The outcome of some work on one rank.

    Attributes:
        value: what it returned.
        error: what it raised, None where it did not.
    """

    value: T | None = None
    error: Exception | None = None

    def taken(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return cast("T", self.value)


def outcome_of(work: Callable[[], T]) -> Outcome[T]:
    """Do some work; an interrupt is no outcome, and leaves at once."""
    try:
        return Outcome(work())
    except Exception as error:  # noqa: BLE001  # raised on every rank
        return Outcome(error=error)


def on_main(engine: Engine, work: Callable[[], T]) -> T:
    """Do some work on the main rank only; return its value, or raise its error, on all ranks. A collective."""
    if engine.world_size == 1:
        return work()
    return of_main(engine, outcome_of(work) if engine.is_main else None)


def of_main(engine: Engine, outcome: Outcome[T] | None) -> T:
    """Return the value that some work had on the main rank, or raise its error, on all ranks. A collective.

    Args:
        engine: connects the ranks.
        outcome: on the main rank, how it went there.
    """
    shared: Outcome[T] = engine.broadcast(None if outcome is None else _portable(outcome, 0))
    return (outcome or shared).taken()


def of_each(engine: Engine, outcome: Outcome[T]) -> list[T]:
    """Return the values that some work had on each rank, or raise the error of the first that failed. A collective."""
    outcomes: list[Outcome[T]] = engine.gather_objects(_portable(outcome, engine.rank))
    outcomes[engine.rank] = outcome
    return [each.taken() for each in outcomes]


def _portable(outcome: Outcome[T], rank: int) -> Outcome[T]:
    """Return an outcome as other processes can read it: an error that does not survive that keeps its text only."""
    if outcome.error is None:
        return outcome
    try:
        error = pickle.loads(pickle.dumps(outcome.error))  # noqa: S301  # our own
    except Exception:  # noqa: BLE001  # whatever the class of an error does when it is pickled
        error = RuntimeError(describe_error(outcome.error))
    error.add_note(f"heliograph: it happened on rank {rank}")
    return Outcome(error=error)
