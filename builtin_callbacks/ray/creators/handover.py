"""What a pass begins from and leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ....events import CheckpointLoaded, EpochEnd, Lane, Log, Run, SavePoint, TrainEnd, TrainStart
from ....plugins import Plugin, on
from .packed_state import packed, unpacked


@dataclass(frozen=True)
class Handed:
    """What the main rank hands over when a pass is done.

    Attributes:
        epoch: how many passes are done.
        metrics: the means over this pass, and the latest of all else.
        state: the consistent cut behind it, packed.
    """

    epoch: int
    metrics: dict[str, float]
    state: bytes


class Handover(Plugin):
    """Begin from a state, and hand the state over behind every pass, and where a pass is cut short.

    Args:
        state: what to begin from, packed; None begins afresh.
        tell: takes what is handed over, on the main rank.
        steps_scheduler: whether a scheduler is stepped that no plugin steps: by a function, or by the caller.
    """

    name = "creators"

    def __init__(self, state: bytes | None, tell: Callable[[Handed], object], *, steps_scheduler: bool) -> None:
        self._state, self._tell = state, tell
        self.asks = ("log", "save", *(["scheduler"] if steps_scheduler else []))
        self._logs: list[tuple[int, dict[str, float]]] = []
        self._samples = 0
        self._is_due = self._has_told = False

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Go on from the state; a plugin that has found a newer one on disk is heard later, and wins."""
        if self._state is not None:
            run.resume(unpacked(self._state))

    @on(CheckpointLoaded, lane=Lane.REPORT)
    def go_on(self, run: Run, event: CheckpointLoaded) -> None:
        """Count from there."""
        self._logs, self._samples, self._is_due = [], run.progress.samples, False

    @on(EpochEnd)
    def end_pass(self, run: Run, event: EpochEnd) -> None:
        """Ask for what is handed over."""
        self._ask(run, "a pass is done")

    @on(TrainEnd)
    def end(self, run: Run, event: TrainEnd) -> None:
        """Ask for it too where a pass was cut short, for the next call to finish, and where none was left to do."""
        if run.progress.batch or not self._has_told:
            self._ask(run, "no pass was done at last")

    @on(Log, lane=Lane.REPORT)
    def collect(self, run: Run, event: Log) -> None:
        """Keep the means since the last log, and of how many samples they are."""
        self._logs.append((run.progress.samples - self._samples, dict(event.metrics)))
        self._samples = run.progress.samples

    @on(SavePoint, lane=Lane.PERSIST)
    def hand_over(self, run: Run, event: SavePoint) -> None:
        """Hand the state over, where that was asked for here."""
        if not self._is_due:
            return
        self._is_due, self._has_told = False, True
        state = run.state_dict()
        if run.engine.is_main:
            metrics = {**run.metrics, **mean_of(self._logs)}
            self._tell(Handed(run.progress.epoch, metrics, packed(state)))
        self._logs = []

    def _ask(self, run: Run, reason: str) -> None:
        self._is_due = True
        run.control.request_log(reason)
        run.control.request_save(reason)


def mean_of(logs: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Return the means over all samples of what was logged as means over some of them; of a single log, as it was."""
    means: dict[str, float] = {}
    for name in {name: None for _, metrics in logs for name in metrics}:
        known = [(samples, metrics[name]) for samples, metrics in logs if name in metrics]
        total = sum(samples for samples, _ in known)
        if len(known) == 1 or not total:
            means[name] = float(known[-1][1])
        else:
            means[name] = sum(samples * value for samples, value in known if samples) / total
    return means
