"""Transfer of the training state between the caller and the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from heliograph import CheckpointLoaded, EpochEnd, Lane, LastBoundary, Log, Plugin, Run, SavePoint, TrainStart, on


def pack_state(state: Mapping[str, Any]) -> bytes:
    buffer = BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def unpack_state(data: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    return state


@dataclass(frozen=True)
class PassResult:
    """The message that the main rank sends after a pass.

    Attributes:
        epoch: the number of completed passes.
        metrics: the means over this pass, and the latest values of other metrics.
        state: the packed snapshot of the run.
    """

    epoch: int
    metrics: dict[str, float]
    state: bytes


class StateTransfer(Plugin):
    """Resumes a packed state, and sends the new state after each pass and after an interruption.

    Args:
        state: the packed state to resume; None starts from the beginning.
        send: called with each result on the main rank.
        steps_scheduler: whether a user's function or the caller steps the scheduler.
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
        if self._state is not None:
            run.resume(unpack_state(self._state))

    @on(CheckpointLoaded, lane=Lane.REPORT)
    def reset_logs(self, run: Run, event: CheckpointLoaded) -> None:
        self._logs, self._samples, self._is_due = [], run.progress.samples, False

    @on(EpochEnd)
    def end_pass(self, run: Run, event: EpochEnd) -> None:
        self._request(run, "a pass is done")

    @on(LastBoundary)
    def end(self, run: Run, event: LastBoundary) -> None:
        if run.progress.batch or not self._has_sent:
            self._request(run, "no pass was done at last")

    @on(Log, lane=Lane.REPORT)
    def collect(self, run: Run, event: Log) -> None:
        self._logs.append((run.progress.samples - self._samples, dict(event.metrics)))
        self._samples = run.progress.samples

    @on(SavePoint, lane=Lane.PERSIST)
    def send_state(self, run: Run, event: SavePoint) -> None:
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
    """Return sample-weighted means over all logs; the values of a single log stay exact."""
    means: dict[str, float] = {}
    for name in {name: None for _, metrics in logs for name in metrics}:
        values = [(samples, metrics[name]) for samples, metrics in logs if name in metrics]
        total = sum(samples for samples, _ in values)
        if len(values) == 1 or not total:
            means[name] = float(values[-1][1])
        else:
            means[name] = sum(samples * value for samples, value in values if samples) / total
    return means
