"""The change with which a fork leaves its parent: made in the fork, and made again where the fork is done again."""

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
    """Return the function that a change is, or that it names, `module:function`; None for none.

    Raises:
        TypeError: it is neither.
        UsageError: there is no such function.
    """
    if isinstance(change, str):
        return find_function(change)
    if change is not None and not callable(change):
        raise TypeError(
            f"{caller}(change=) takes a function of the run, or the name of one, module:function; got {change!r}."
        )
    return change


def make_change(run: Run, change: Change, by: str = BY) -> None:
    """Change a run, and request a save: without one, a kill before the first scheduled save would lose the change."""
    change(run)
    if "save" in run.plugins.declared("asks"):
        run.control.request_save(CHANGED, by=by)


def connect_before_batches(bus: Bus, receiver: Callable[[Run, BatchStart], None], owner: str) -> None:
    """Call a function at the start of each batch, before any other handler."""
    signal: OrderedSignal[BatchStart] = bus.signal(BatchStart)
    signal.connect(receiver, weak=False, subscription=Subscription((Lane.TRANSFORM, -2), FunctionName(owner)))


@dataclass(frozen=True, slots=True)
class RecordedChange:
    """The change of a recorded fork.

    Attributes:
        step: it was made right before the first batch after this one.
        name: of the function that made it.
        place: the epoch, and the batches of it that were done then; None where that is not recorded.
    """

    step: int
    name: str
    place: tuple[int, int] | None = None

    def is_after(self, place: tuple[int, int], step: int) -> bool:
        """Return whether it was made after a checkpoint was written."""
        return step <= self.step if self.place is None else place <= self.place

    def problem(self, change: Change) -> str:
        """Return how a function is not the one that made it, by their names; empty where it may be."""
        given = describe(change)
        if given == self.name:
            return ""
        return f"the run is a fork, which {self.name} has changed after step {self.step}, and change= is {given}"


def parent_of(attempt: AttemptRecord) -> tuple[str, int] | None:
    """Return the recording from which a fork parts, and after which step; None where it is no fork."""
    parent = attempt.hyper_parameters.get(PARENT)
    if not isinstance(parent, str):
        return None
    recording, _, step = parent.rpartition(BETWEEN)
    return recording, int(step)


def recorded_change(attempt: AttemptRecord) -> RecordedChange | None:
    """Return the change that the first attempt of a fork has made; None where it is no fork, or was not changed."""
    parent, name = parent_of(attempt), attempt.hyper_parameters.get(CHANGE)
    if parent is None or not isinstance(name, str):
        return None
    requests = [each.request for each in attempt.entries if isinstance(each, RequestEntry)]
    saves = [(each.epoch, each.batch) for each in requests if (each.verb, each.reason) == ("save", CHANGED)]
    return RecordedChange(parent[1], name, saves[0] if saves else None)


class RepeatedChange:
    """Makes the change of a recorded fork again, where the fork made it.

    Args:
        recorded: the change.
        change: the function that made it; None where it is not given.
        exact: whether to refuse where it is not; else the run is not changed, and a note says so.
        mend: what to do where it is not given.

    Attributes:
        refusal: why the run was refused; None if it was not.
        notes: what was not changed, or by another function.

    Raises:
        NotExact: it is exact, and the function has another name than the one that made the change.
    """

    def __init__(self, recorded: RecordedChange, change: Change | None, *, exact: bool, mend: str = GIVE) -> None:
        self.refusal: NotExact | None = None
        self.notes: list[str] = []
        self._recorded, self._change, self._exact, self._mend = recorded, change, exact, mend
        self._is_done = False
        if change is not None and (problem := recorded.problem(change)):
            if exact:
                raise NotExact((problem,))
            self.notes.append(problem)
        elif change is not None and recorded.name.endswith("<lambda>"):
            self.notes.append("the change of the fork has no name of its own, so that change= is the same is not known")

    def subscribe(self, trainer: Trainer) -> None:
        """Handle the start of each batch."""
        connect_before_batches(trainer.bus, self.make, BY)

    def make(self, run: Run, event: BatchStart) -> None:
        """Change the run, if the step is reached."""
        if self._is_done or run.progress.steps < self._recorded.step:
            return
        self._is_done = True
        if self._change is not None:
            make_change(run, self._change)
            return
        recorded = self._recorded
        text = f"the run is a fork, which {recorded.name} has changed after step {recorded.step}: {self._mend}"
        self.notes.append(text)
        if self._exact:
            self.refusal = NotExact((text,))
            raise self.refusal

    def stop(self) -> None:
        """Change nothing any more."""
        self._is_done = True
