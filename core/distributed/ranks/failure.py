"""A rank's failure: how the others are informed of it, and how they know that theirs is only its consequence."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from dis import opname
from typing import Any, Generic, Self, TypeVar, cast

from torch.distributed import DistError, ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ....events import Engine
from ....events.errors import describe_error, error_text
from ...system.errors import RankFailed

# The backends name themselves; but for gloo, where it says again that a rank was waited for too long.
BROKEN = re.compile(r"\bgloo\b|\bNCCL\b|\bProcessGroup\w*\b|\bpair closure\b")
TIMED_OUT = "Timed out"  # what gloo says where it waited for a rank too long: it raises a RuntimeError as for all else


class LateRankError(DistError):
    """A rank lives, and did not come in time."""


class JsonFacts:
    """A dataclass that ranks write for each other as JSON."""

    __slots__ = ()

    @classmethod
    def read(cls, text: str | bytes) -> Self:
        """Return what a rank wrote."""
        return cls(**json.loads(text))

    def write(self: Any) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Failure(JsonFacts):
    """What is reported of the rank that failed first.

    Attributes:
        rank: the one that failed.
        kind: the qualified name of the exception's type; `died`, `hung` or `left` where another rank reports it.
        text: the exception's text, or what was seen of that rank.
        place: where in the run it was.
        interrupt: whether it was a Ctrl-C.
    """

    rank: int
    kind: str
    text: str = ""
    place: str = ""
    interrupt: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int, place: str) -> Self:
        """Return what is to be reported of an exception."""
        return cls(rank, qualified_name(type(error)), error_text(error), place, isinstance(error, KeyboardInterrupt))

    def as_error(self) -> BaseException:
        """Return what the other ranks raise: a KeyboardInterrupt where it was one, else RankFailed."""
        error = RankFailed(self.rank, self.kind, self.text, self.place)
        return KeyboardInterrupt(str(error)) if self.interrupt else error


def qualified_name(kind: type[BaseException]) -> str:
    """Return a type's name with its module, but for built-in ones."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_broken_collective(error: BaseException) -> bool:
    """Return whether an exception, or one that it came from, is a collective that the other ranks did not complete."""
    return any(_is_broken(each) for each in error_chain(error))


def is_late(error: BaseException) -> bool:
    """Return whether an exception, or one that it came from, is a collective that waited too long for a rank."""
    return any(_is_late(each) for each in error_chain(error))


def release_groups(error: BaseException) -> None:
    """Forget the local variables of the functions that an exception left and that hold a process group.

    While anything refers to a gloo group, its connections stay open and the other ranks keep waiting.
    """
    for each in error_chain(error):
        trace = each.__traceback__
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            held = frame.f_locals  # a dict that stays with the frame
            if any(map(_holds_group, held.values())):
                try:
                    frame.clear()
                except RuntimeError:  # it still runs: its variables are its own
                    continue
                held.clear()


def _holds_group(value: object) -> bool:
    """Return whether a variable refers to a process group: itself, or as arguments that torch's wrappers pass on."""
    parts = value if type(value) is tuple else value.values() if type(value) is dict else (value,)
    return any(isinstance(each, ProcessGroup | DistributedDataParallel) for each in parts)


def _is_broken(error: BaseException) -> bool:
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and bool(BROKEN.search(error_text(error))) and not _is_of_python(error)


def _is_late(error: BaseException) -> bool:
    return isinstance(error, LateRankError) or (_is_broken(error) and TIMED_OUT in error_text(error))


def _is_of_python(error: BaseException) -> bool:
    """Return whether a `raise` has raised an error: a user's own, whatever it says. Those of a backend come out of C++.

    Which functions it has left shows nothing: user code runs within torch's wrappers, and may itself exchange.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it came from or that were being handled."""
    seen: dict[int, BaseException] = {}
    found: list[BaseException | None] = [error]
    while found:
        each = found.pop()
        if each is not None and id(each) not in seen:
            seen[id(each)] = each
            found += [each.__context__, each.__cause__]
    yield from seen.values()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkOutcome(Generic[T]):
    """The outcome of some work on one rank.

    Attributes:
        value: what it returned.
        error: what it raised, None where it did not.
    """

    value: T | None = None
    error: Exception | None = None

    def value_or_raise(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return cast("T", self.value)


def outcome_of(work: Callable[[], T]) -> WorkOutcome[T]:
    """Do some work; an interrupt is not an outcome, and leaves at once."""
    try:
        return WorkOutcome(work())
    except Exception as error:  # noqa: BLE001  # raised on every rank
        return WorkOutcome(error=error)


def on_main(engine: Engine, work: Callable[[], T]) -> T:
    """Do some work on the main rank only; return its value, or raise its error, on all ranks. A collective."""
    if engine.world_size == 1:
        return work()
    return value_of_main(engine, outcome_of(work) if engine.is_main else None)


def value_of_main(engine: Engine, outcome: WorkOutcome[T] | None) -> T:
    """Return the value that some work had on the main rank, or raise its error, on all ranks. A collective.

    Args:
        engine: connects the ranks.
        outcome: on the main rank, how it went there.
    """
    shared: WorkOutcome[T] = engine.broadcast(None if outcome is None else _portable(outcome, 0))
    return (outcome or shared).value_or_raise()


def values_of_ranks(engine: Engine, outcome: WorkOutcome[T]) -> list[T]:
    """Return the values that some work had on each rank, or raise the error of the first that failed. A collective."""
    outcomes: list[WorkOutcome[T]] = engine.gather_objects(_portable(outcome, engine.rank))
    outcomes[engine.rank] = outcome
    return [each.value_or_raise() for each in outcomes]


def _portable(outcome: WorkOutcome[T], rank: int) -> WorkOutcome[T]:
    """Return an outcome as other processes can read it: an error that does not survive that keeps its text only."""
    if outcome.error is None:
        return outcome
    try:
        error = pickle.loads(pickle.dumps(outcome.error))  # noqa: S301  # our own
    except Exception:  # noqa: BLE001  # whatever the class of an error does when it is pickled
        error = RuntimeError(describe_error(outcome.error))
    error.add_note(f"heliograph: it happened on rank {rank}")
    return WorkOutcome(error=error)
