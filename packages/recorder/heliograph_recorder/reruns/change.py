"""The change of a fork: made in the fork, and repeated in a rerun of the fork."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from heliograph import BatchStart, Bus, Lane, Run, Trainer
from heliograph.events import FunctionName, OrderedSignal, Subscription
from heliograph.spi import describe, find_function

from ..explain.lineage import BETWEEN, CHANGE, PARENT
from ..format.records import AttemptRecord, RequestEntry
from .errors import NotExact

Change = Callable[[Run], object]
CHANGED, BY = "the fork has been changed", "fork"
GIVE = "give the same function, change= (--change on the command line)"


def change_of(caller: str, change: Change | str | None) -> Change | None:
    """Return the function of a `change=` argument."""
    if isinstance(change, str):
        return find_function(change)
    if change is not None and not callable(change):
        raise TypeError(
            f"{caller}(change=) takes a function of the run, or its name as module:function; got {change!r}."
        )
    return change


def make_change(run: Run, change: Change, by: str = BY) -> None:
    """Change a run, and request a save, because a kill before the first scheduled save would lose the change."""
    change(run)
    if "save" in run.plugins.declared("asks"):
        run.control.request_save(CHANGED, by=by)


def connect_before_batches(bus: Bus, receiver: Callable[[Run, BatchStart], None], owner: str) -> None:
    """Call a function at the start of each batch, before all other handlers."""
    signal: OrderedSignal[BatchStart] = bus.signal(BatchStart)
    signal.connect(receiver, weak=False, subscription=Subscription((Lane.TRANSFORM, -2), FunctionName(owner)))


@dataclass(frozen=True, slots=True)
class RecordedChange:
    """The change of a recorded fork, which was made right before the first batch after `step`.

    Attributes:
        step: the number of steps before it.
        name: of the function.
        place: the epoch, and the number of batches in it; None if it was not recorded.
    """

    step: int
    name: str
    place: tuple[int, int] | None = None

    def is_after(self, place: tuple[int, int], step: int) -> bool:
        """True if it was made after a checkpoint."""
        return step <= self.step if self.place is None else place <= self.place


def parent_of(attempt: AttemptRecord) -> tuple[str, int] | None:
    """Return the parent of a fork, as recording and step; None for other runs."""
    parent = attempt.hyper_parameters.get(PARENT)
    if not isinstance(parent, str):
        return None
    recording, _, step = parent.rpartition(BETWEEN)
    return recording, int(step)


def recorded_change(attempt: AttemptRecord) -> RecordedChange | None:
    """Return the change in the first attempt of a fork."""
    parent, name = parent_of(attempt), attempt.hyper_parameters.get(CHANGE)
    if parent is None or not isinstance(name, str):
        return None
    requests = [entry.request for entry in attempt.entries if isinstance(entry, RequestEntry)]
    saves = [
        (request.epoch, request.batch) for request in requests if (request.verb, request.reason) == ("save", CHANGED)
    ]
    return RecordedChange(parent[1], name, saves[0] if saves else None)


class RepeatedChange:
    """Repeats the change of a recorded fork in a rerun.

    Args:
        recorded: the change.
        change: its function, None if it was not given.
        exact: refuse a missing or different function; otherwise `notes` mentions it.
        fix: how to fix a missing function.

    Attributes:
        refusal: the error that ended the run.
        notes: what was not repeated exactly.
    """

    def __init__(self, recorded: RecordedChange, change: Change | None, *, exact: bool, fix: str = GIVE) -> None:
        self.refusal: NotExact | None = None
        self.notes: list[str] = []
        self._step, self._change, self._exact = recorded.step, change, exact
        self._is_done = False
        source = f"the fork was changed by {recorded.name} after step {recorded.step}"
        self._missing = f"{source}: {fix}"
        if change is not None and (name := describe(change)) != recorded.name:
            if exact:
                raise NotExact((f"{source}, but change= is {name}",))
            self.notes.append(f"{source}, but change= is {name}")
        elif change is not None and recorded.name.endswith("<lambda>"):
            self.notes.append("the fork was changed by a lambda, so change= may be another function")

    def subscribe(self, trainer: Trainer) -> None:
        connect_before_batches(trainer.bus, self.make, BY)

    def make(self, run: Run, event: BatchStart) -> None:
        if self._is_done or run.progress.steps < self._step:
            return
        self._is_done = True
        if self._change is not None:
            make_change(run, self._change)
            return
        self.notes.append(self._missing)
        if self._exact:
            self.refusal = NotExact((self._missing,))
            raise self.refusal

    def stop(self) -> None:
        self._is_done = True
