"""What a run has saved, and what to say at its end of missing saves and lost work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from pathlib import Path

from ...core.checkpoint.storage import JudgedBy
from ...core.metrics.monitor import Monitor
from ...events import Run


@dataclass(slots=True)
class Saved:
    """What a run has saved and measured.

    Attributes:
        steps: of the newest checkpoint, None where there is none.
        is_own: whether that is the newest of this training, so that a measurement of the same weights judges it.
        asked_at: the step of the newest save.
        error: what failed the run.
    """

    steps: int | None = None
    is_own: bool = False
    asked_at: int | None = None
    error: BaseException | None = None

    def hold(self, steps: int, *, is_own: bool = True) -> None:
        """Note where the newest checkpoint is."""
        self.steps, self.is_own = steps, is_own

    def missing(
        self,
        run: Run,
        folder: Path,
        monitor: Monitor | None,
        measured_at: int,
        best: JudgedBy | None,
        *,
        asks: bool,
    ) -> Iterator[str]:
        """Yield a sentence for each thing that was asked for and is not there, at the end of a run that ended well.

        Args:
            run: the run.
            folder: where checkpoints are written.
            monitor: what the best are chosen by.
            measured_at: the step at which the metric was measured last, -1 where it was not.
            best: what the best checkpoint is judged by.
            asks: whether the plugin asks for saves itself.
        """
        steps = run.progress.steps
        history = run.control.history
        takers = dict.fromkeys(each.by for each in history if each.verb in ("veto_save", "withdraw_save"))
        if self.steps is None and run.progress.batches and takers:
            yield f"No checkpoint was written to {folder}: the saves were vetoed or withdrawn, by {', '.join(takers)}."
        elif self.steps is None and run.progress.batches:
            mend = "give it every=Every(epochs=1), which also asks for one at the end"
            if asks:
                mend = "its every= asks only while it is on, so let its when() hold, or enable it, in time"
            yield f"No checkpoint was written to {folder}, no save was asked for in {steps} steps: {mend}."
        if self.steps is None or not run.progress.batches:
            return
        if self.steps < steps and not takers:  # else somebody has decided so
            yield (
                f"The newest checkpoint in {folder} is of step {self.steps}, and the run ended at step {steps}: "
                f"{_steps(steps - self.steps)} not in it. Checkpoint(..., every=...) saves the end, too, "
                f"and so does a SaveSchedule without at_end=False."
            )
        if monitor is not None and best is not None and best[2] is not None and isnan(best[2]):
            yield f"No checkpoint is the best: {monitor.name!r} was not a number at any of them."
        if monitor is not None and run.best_checkpoint is None:
            measured = "never measured" if measured_at < 0 else f"measured last at step {measured_at}"
            saved = "nothing was saved since" if self.asked_at is None else f"the last save was at step {self.asked_at}"
            yield (
                f"No checkpoint is the best by {monitor.name!r}, since none was saved where it was measured: it "
                f"was {measured}, and {saved}. Let them meet, as in "
                f"{'Validation' if monitor.split == 'validation' else 'Log'}Schedule(steps=100) and "
                f"Checkpoint(..., every=Every(steps=200))."
            )

    def lost(self, run: Run, folder: Path, path: Path | None, *, resumes: bool) -> str | None:
        """Return which checkpoint is the newest, what is not in it, and how to resume; None for nothing.

        Args:
            run: a run that ended early.
            folder: where checkpoints are written.
            path: the newest one.
            resumes: whether the program resumes it when it is started again.
        """
        steps = run.progress.steps
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
