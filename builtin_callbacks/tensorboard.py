"""Curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

from ..core.system.extras import require
from ..events import CheckpointLoaded, Lane, Log, Run, RunClosed, TestEnd, ValidationEnd
from ..plugins import Plugin, on


class TensorBoard(Plugin):
    """Write metrics and learning rates for TensorBoard.

    Throughput and hyper-parameters are written too. The throughput, `train/samples_per_second`, is measured over the
    time since the last log, validation included. The gradient norm is there when `GradientClipping` is. A run that is
    resumed or goes back continues in the same folder; steps beyond the checkpoint are purged, and a fresh run purges
    them all.

    Args:
        folder: where the event files go; made where it is missing.
    """

    name = "tensorboard"
    policy = "observer"
    draws = False
    ranks = "main"

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._summary_writer = _summary_writer()
        self._writer: Any = None
        self._since: tuple[float, int] | None = None
        self._purge: int | None = None

    def reset(self) -> None:
        """Start the clock of the throughput, and hide what a former fit has drawn."""
        self._since = None
        self._purge = 0

    @on(CheckpointLoaded)
    def go_on(self, run: Run, event: CheckpointLoaded) -> None:
        """Hide only what was drawn after the checkpoint; measure the throughput again from here."""
        self.close()
        self._since = None
        self._purge = run.origin.steps + 1

    @on(Log, lane=Lane.MEASURE, optional=True)
    def measure(self, run: Run, event: Log) -> None:
        """Add the throughput and the learning rate; in a replay, what the run measured is in the log already."""
        if run.is_replay:
            return
        now, samples = perf_counter(), run.progress.samples
        if self._since is not None and now > self._since[0]:
            event.metrics["train/samples_per_second"] = (samples - self._since[1]) / (now - self._since[0])
        self._since = now, samples
        for name, optimizer in run.optimizers.items():
            rate = float(optimizer.param_groups[0]["lr"])
            event.metrics.setdefault(f"train/{run.label('learning_rate', name)}", rate)

    @on(Log, ValidationEnd, TestEnd, lane=Lane.REPORT)
    def write(self, run: Run, event: Log | ValidationEnd | TestEnd) -> None:
        """Write scalars at the current step."""
        writer = self._open(run)
        for name, value in event.metrics.items():
            writer.add_scalar(name, value, run.progress.steps)

    @on(RunClosed)
    def write_hyper_parameters(self, run: Run, event: RunClosed) -> None:
        """Write the hyper-parameters beside the final metrics."""
        if self._writer is not None and run.hyper_parameters:
            plain = {
                key: value if isinstance(value, bool | int | float | str) else str(value)
                for key, value in run.hyper_parameters.items()
            }
            self._writer.add_hparams(plain, dict(run.metrics), run_name="hyper_parameters")

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, run: Run) -> Any:
        if self._writer is None:
            purge, self._purge = None if run.optimizer is None else self._purge, None
            self._writer = self._summary_writer(str(self.folder), purge_step=purge)
        return self._writer


def _summary_writer() -> Any:
    require("tensorboard", "TensorBoard")  # torch's own sentence names no command
    return require("torch.utils.tensorboard", "TensorBoard").SummaryWriter
