"""Work on some ranks whose value, or error, every rank gets."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from ...events.checks import describe_error

if TYPE_CHECKING:
    from ...events import Engine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkOutcome(Generic[T]):
    """The outcome of some work on one rank.

    Attributes:
        value: the return value.
        error: the exception, or None.
    """

    value: T | None = None
    error: Exception | None = None

    def value_or_raise(self) -> T:
        if self.error is not None:
            raise self.error
        return cast("T", self.value)


def outcome_of(work: Callable[[], T]) -> WorkOutcome[T]:
    """Run some work; an interrupt is not an outcome and propagates."""
    try:
        return WorkOutcome(work())
    except Exception as error:  # noqa: BLE001  # raised on every rank
        return WorkOutcome(error=error)


def on_main(engine: Engine, work: Callable[[], T]) -> T:
    """Run some work on the main rank only; return its value, or raise its error, on all ranks. A collective."""
    if engine.world_size == 1:
        return work()
    return value_of_main(engine, outcome_of(work) if engine.is_main else None)


def value_of_main(engine: Engine, outcome: WorkOutcome[T] | None) -> T:
    """Return the main rank's value, or raise its error, on all ranks. A collective.

    Args:
        engine: connects the ranks.
        outcome: the outcome on the main rank.
    """
    shared: WorkOutcome[T] = engine.broadcast(None if outcome is None else _portable(outcome, 0))
    return (outcome or shared).value_or_raise()


def values_of_ranks(engine: Engine, outcome: WorkOutcome[T]) -> list[T]:
    """Return the values of all ranks, or raise the error of the first rank that failed. A collective."""
    outcomes: list[WorkOutcome[T]] = engine.gather_objects(_portable(outcome, engine.rank))
    outcomes[engine.rank] = outcome
    return [result.value_or_raise() for result in outcomes]


def _portable(outcome: WorkOutcome[T], rank: int) -> WorkOutcome[T]:
    # An error that cannot be pickled keeps only its text.
    if outcome.error is None:
        return outcome
    try:
        error = pickle.loads(pickle.dumps(outcome.error))  # noqa: S301  # our own
    except Exception:  # noqa: BLE001  # pickling the user's class may raise anything
        error = RuntimeError(describe_error(outcome.error))
    error.add_note(f"heliograph: raised on rank {rank}")
    return WorkOutcome(error=error)
