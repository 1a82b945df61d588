"""The state in which passes start, and that is returned after each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from heliograph import CheckpointLoaded, EpochEnd, Lane, LastBoundary, Log, Plugin, Run, SavePoint, TrainStart, on

from .packed_state import pack_state, unpack_state


@dataclass(frozen=True)
class PassResult:
    """What the main rank sends after a pass.

    Attributes:
        epoch: the number of passes that are done.
        metrics: the means over this pass, and the latest values of other metrics.
        state: a snapshot of the run, packed.
    """

    epoch: int
    metrics: dict[str, float]
    state: bytes


class StateTransfer(Plugin):
    """Resumes a state, and sends the state to the caller after every pass, and when a pass is interrupted.

    Args:
        state: the state to resume, packed; None starts from the beginning.
        send: called with each result, on the main rank.
        steps_scheduler: whether a scheduler is stepped that no plugin steps: by a function, or by the caller.
    """

    name = "creators"

    def __init__(self, state: bytes | None, send: Callable[[PassResult], object], *, steps_scheduler: bool) -> None:
        self._state, self._send = state, send
        self.asks = ("log", "save", *(["scheduler"] if steps_scheduler else []))
        self._logs: list[tuple[int, dict[str, float]]] = []
        self._samples = 0
        self._is_due = self._has_sent = False

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Resume the state; a plugin that runs later and has found a newer one on disk replaces it."""
        if self._state is not None:
            run.resume(unpack_state(self._state))

    @on(CheckpointLoaded, lane=Lane.REPORT)
    def reset_logs(self, run: Run, event: CheckpointLoaded) -> None:
        """Collect logs from the loaded position on."""
        self._logs, self._samples, self._is_due = [], run.progress.samples, False

    @on(EpochEnd)
    def end_pass(self, run: Run, event: EpochEnd) -> None:
        """Request a log and a save."""
        self._request(run, "a pass is done")

    @on(LastBoundary)
    def end(self, run: Run, event: LastBoundary) -> None:
        """Request them too if a pass was interrupted, which the next call finishes, or none was left to do."""
        if run.progress.batch or not self._has_sent:
            self._request(run, "no pass was done at last")

    @on(Log, lane=Lane.REPORT)
    def collect(self, run: Run, event: Log) -> None:
        """Keep the means since the last log, with their number of samples."""
        self._logs.append((run.progress.samples - self._samples, dict(event.metrics)))
        self._samples = run.progress.samples

    @on(SavePoint, lane=Lane.PERSIST)
    def send_state(self, run: Run, event: SavePoint) -> None:
        """Send the state, if this plugin requested the save."""
        if not self._is_due:
            return
        self._is_due, self._has_sent = False, True
        state = run.state_dict()
        if run.engine.is_main:
            metrics = {**run.metrics, **average_metrics(self._logs)}
            self._send(PassResult(run.progress.epoch, metrics, pack_state(state)))
        self._logs = []

    def _request(self, run: Run, reason: str) -> None:
        self._is_due = True
        run.control.request_log(reason)
        run.control.request_save(reason, required=True)


def average_metrics(logs: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Return the means over all samples of logs, each with its number of samples; a single log's values as they are."""
    means: dict[str, float] = {}
    for name in {name: None for _, metrics in logs for name in metrics}:
        known = [(samples, metrics[name]) for samples, metrics in logs if name in metrics]
        total = sum(samples for samples, _ in known)
        if len(known) == 1 or not total:
            means[name] = float(known[-1][1])
        else:
            means[name] = sum(samples * value for samples, value in known if samples) / total
    return means
