"""Curves for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from ..core.checkpoint.storage import clean
from ..core.metrics.rates import Rates
from ..core.system.extras import require
from ..events import CheckpointLoaded, Lane, Log, PredictEnd, Run, RunClosed, TestEnd, TrainStart, ValidationEnd
from ..plugins import Plugin, on


class TensorBoard(Plugin):
    """Write metrics and learning rates for TensorBoard.

    The throughput, `train/samples_per_second` and, where losses are sums over tokens, `train/tokens_per_second`, is
    measured over the time since the last log, validation included. The gradient norm is there when
    `GradientClipping` is. Where the folder holds the curves of another run, a fresh one writes to a folder in it,
    `<run>_<date>_<time>`, which TensorBoard shows beside them. A run that is resumed or goes back writes to its own
    folder again; steps beyond the checkpoint are purged.

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
        self._rates = Rates()
        self._purge: int | None = None
        self._path = self.folder  # of this run

    def reset(self) -> None:
        """Start the clock of the throughput, and hide nothing of what was drawn before."""
        self._rates, self._purge = Rates(), None

    def describe(self, run: Run) -> str:
        """Say where curves are written."""
        return f"logs to {self._path}"

    def rehearse(self, folder: Path) -> list[Path]:
        """Write the curves elsewhere."""
        former, self.folder, self._path = self.folder, folder, folder
        return [former]

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Choose a folder that holds no other run."""
        self._path, number = self.folder, 1
        start = f"{clean(run.name)}_{datetime.now():%Y-%m-%d_%H-%M-%S}"
        while any(self._path.glob("events.out.tfevents.*")):
            self._path = self.folder / (start if number == 1 else f"{start}-{number}")
            number += 1

    @on(CheckpointLoaded)
    def go_on(self, run: Run, event: CheckpointLoaded) -> None:
        """Hide only what was drawn after the checkpoint; measure the throughput again from here."""
        self.close()
        self._rates = Rates()
        self._purge = run.origin.steps + 1

    def state_dict(self) -> dict[str, Any]:
        """Return where in the folder the curves are."""
        return {"folder": self._path.relative_to(self.folder).as_posix()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        if state:  # else the run goes back to where this plugin was not there yet
            self._path = self.folder / state["folder"]

    @on(Log, lane=Lane.MEASURE, optional=True)
    def measure(self, run: Run, event: Log) -> None:
        """Add the throughput and the learning rate; in a replay, what the run measured is in the log already."""
        if run.is_replay:
            return
        for name, rate in self._rates.read(run.progress, perf_counter()).items():
            if name != "steps_per_second":
                event.metrics[f"train/{name}"] = rate
        for name, optimizer in run.optimizers.items():
            rate = float(optimizer.param_groups[0]["lr"])
            event.metrics.setdefault(f"train/{run.label('learning_rate', name)}", rate)

    @on(Log, ValidationEnd, TestEnd, PredictEnd, lane=Lane.REPORT)
    def write(self, run: Run, event: Log | ValidationEnd | TestEnd | PredictEnd) -> None:
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
            if self._path != self.folder and not self._path.exists():
                run.note(f"{self.folder} holds the curves of another run: those of this one are in {self._path}")
            self._writer = self._summary_writer(str(self._path), purge_step=purge)
        return self._writer


def _summary_writer() -> Any:
    require("tensorboard", "TensorBoard")  # torch's own sentence names no command
    return require("torch.utils.tensorboard", "TensorBoard").SummaryWriter
