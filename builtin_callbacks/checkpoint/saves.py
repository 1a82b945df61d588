"""What a run has saved, and what to say at its end of missing saves and lost work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.checkpoint.storage import JudgedBy
from ...core.metrics.monitor import Monitor
from ...events import Run

if TYPE_CHECKING:
    from .saver import Saver


@dataclass(slots=True)
class Saved:
    """What a run has saved and measured.

    Attributes:
        path: the newest checkpoint.
        steps: the optimizer steps of the newest checkpoint.
        is_own: whether it is the newest of this training, so that a measurement of the same weights judges it.
        asked_at: the step of the newest save.
        value: the latest value of the metric that ranks checkpoints.
        measured_at: the step at which it was measured, -1 before.
        error: what failed the run.
    """

    path: Path | None = None
    steps: int | None = None
    is_own: bool = False
    asked_at: int | None = None
    value: float | None = None
    measured_at: int = -1
    error: BaseException | None = None

    def judged_at(self, step: int, monitor: Monitor | None) -> JudgedBy | None:
        """Return what a checkpoint of a step is judged by, if the metric was measured at that step."""
        return None if monitor is None or step != self.measured_at else (monitor.name, monitor.mode, self.value)

    def missing(self, run: Run, plugin: Saver) -> Iterator[str]:
        """Yield a sentence for each thing that the plugin was to save and has not, at the end of a completed run."""
        folder, name, steps, monitor = plugin.folder, type(plugin).__name__, run.progress.steps, plugin.monitor
        best = None if plugin.best is None else plugin.best.judged_by
        history = run.control.history
        takers = dict.fromkeys(each.by for each in history if each.verb in ("veto_save", "withdraw_save"))
        if self.steps is None and run.progress.batches and takers:
            yield f"No checkpoint was written to {folder}: the saves were vetoed or withdrawn, by {', '.join(takers)}."
        elif self.steps is None and run.progress.batches:
            remedy = "give it every=Every(epochs=1), which also asks for one at the end"
            if plugin.asks:
                remedy = "its every= asks only while it is on, so let its when() hold, or enable it, in time"
            yield f"No checkpoint was written to {folder}, no save was asked for in {steps} steps: {remedy}."
        if self.steps is None or not run.progress.batches:
            return
        if self.steps < steps and not takers:  # else somebody has decided so
            yield (
                f"The newest checkpoint in {folder} is of step {self.steps}, and the run ended at step {steps}: "
                f"{_steps(steps - self.steps)} not in it. {name}(..., every=...) saves the end, too, "
                f"and so does a SaveSchedule without at_end=False."
            )
        if monitor is None or not monitor.can_come(run):
            return
        if best is not None and best[2] is not None and isnan(best[2]):
            yield f"No checkpoint is the best: {monitor.name!r} was not a number at any of them."
        if run.best_checkpoint is None:
            measured = "never measured" if self.measured_at < 0 else f"measured last at step {self.measured_at}"
            saved = "nothing was saved since" if self.asked_at is None else f"the last save was at step {self.asked_at}"
            yield (
                f"No checkpoint is the best by {monitor.name!r}, since none was saved where it was measured: it "
                f"was {measured}, and {saved}. Let them meet, as in "
                f"{'Validation' if monitor.split == 'validation' else 'Log'}Schedule(steps=100) and "
                f"{name}(..., every=Every(steps=200))."
            )

    def lost(self, run: Run, folder: Path, *, resumes: bool) -> str | None:
        """Return which checkpoint is the newest, what is not in it, and how to resume; None for nothing.

        Args:
            run: a run that ended early.
            folder: where checkpoints are written.
            resumes: whether the program resumes it when it is started again.
        """
        steps, path = run.progress.steps, self.path
        if path is None or self.steps is None:
            return f"no checkpoint was written: {_steps(steps)} lost" if steps else None
        loss = f"{_steps(steps - self.steps)} lost" if steps > self.steps else "no step is lost"
        if run.engine.is_main and not path.exists():  # another rank may not see the folder
            return f"the newest checkpoint was {path}, of step {self.steps}, and is gone: nothing is there to resume"
        newest = f"the newest checkpoint is {path}, of step {self.steps}, {loss}"
        is_there = path.parent.resolve() == folder.resolve()
        if resumes and is_there:
            return f"{newest}; to resume it, start the program again"
        name = "" if run.name == "run" else f" in a run of name={run.name!r}"
        resume = "auto" if is_there else str(path)
        return f"{newest}; to resume it, Checkpoint({str(folder)!r}, resume={resume!r}){name}"


def _steps(number: int) -> str:
    return "1 step is" if number == 1 else f"{number} steps are"
