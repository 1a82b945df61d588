"""The change with which a fork leaves its parent: made in the fork, and made again where the fork is done again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from heliograph.builtin_callbacks.recorder.explain.lineage import BETWEEN, CHANGE, PARENT
from heliograph.builtin_callbacks.recorder.format.records import AttemptRecord, RequestEntry
from heliograph.core.trainer import Trainer
from heliograph.events import BatchStart, Bus, Lane, Run
from heliograph.events.bus import FunctionName, OrderedSignal, Subscription
from heliograph.reruns.errors import NotExact

Change = Callable[[Run], object]
CHANGED, BY = "the fork has been changed", "fork"


def check_change(caller: str, change: object) -> None:
    """Raise TypeError where a change is given that is not a function."""
    if change is not None and not callable(change):
        raise TypeError(f"{caller}(change=) takes a function of the run, got {change!r}.")


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


def recorded_change(attempt: AttemptRecord) -> RecordedChange | None:
    """Return the change that the first attempt of a fork has made; None where it is no fork, or was not changed."""
    about = attempt.hyper_parameters
    parent, name = about.get(PARENT), about.get(CHANGE)
    if not isinstance(parent, str) or not isinstance(name, str):
        return None
    requests = [each.request for each in attempt.entries if isinstance(each, RequestEntry)]
    saves = [(each.epoch, each.batch) for each in requests if (each.verb, each.reason) == ("save", CHANGED)]
    return RecordedChange(int(parent.rpartition(BETWEEN)[2]), name, saves[0] if saves else None)


class RepeatedChange:
    """Makes the change of a recorded fork again, where the fork made it.

    Args:
        recorded: the change.
        change: the function that made it; None where it is not given.
        exact: whether to refuse where it is not; else the run is not changed, and a note says so.

    Attributes:
        refusal: why the run was refused; None if it was not.
        notes: what was not changed.
    """

    def __init__(self, recorded: RecordedChange, change: Change | None, *, exact: bool) -> None:
        self.refusal: NotExact | None = None
        self.notes: list[str] = []
        self._recorded, self._change, self._exact, self._is_done = recorded, change, exact, False

    def subscribe(self, trainer: Trainer) -> None:
        """Handle the start of each batch."""
        connect_before_batches(trainer.bus, self.make, "the repeated change")

    def make(self, run: Run, event: BatchStart) -> None:
        """Change the run, if the step is reached."""
        if self._is_done or run.progress.steps < self._recorded.step:
            return
        self._is_done = True
        if self._change is not None:
            make_change(run, self._change)
            return
        text = (
            f"the run is a fork, which {self._recorded.name} has changed after step {self._recorded.step}: give goto "
            f"the same function, change= (--change on the command line)"
        )
        self.notes.append(text)
        if self._exact:
            self.refusal = NotExact((text,))
            raise self.refusal

    def stop(self) -> None:
        """Change nothing any more."""
        self._is_done = True
