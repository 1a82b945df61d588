"""The saves of a run: when they are requested, and the report at its end of missing saves and lost work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

from ...core.checkpoint.storage import JudgedBy
from ...core.metrics.monitor import Monitor
from ...events import Run
from ...plugins.filters import Filter, Recurrence, is_unsaved, moment


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


class SaveRequests:
    """Ask for saves, or for none.

    Args:
        every: the filter; None leaves it to other plugins.

    Raises:
        TypeError: it is not a filter.
    """

    def __init__(self, every: Filter | None) -> None:
        if not isinstance(every, Filter | None):
            raise TypeError(f"Checkpoint(every=...) takes a filter such as Every(epochs=1), got {every!r}.")
        self.every = deepcopy(every)
        self._recurrence = None if self.every is None else Recurrence(self.every)

    def begin(self, run: Run) -> None:
        """Forget the former run."""
        if self._recurrence is not None:
            self._recurrence.begin(run)

    def resume(self, run: Run) -> None:
        """Continue from what was saved."""
        if self._recurrence is not None:
            self._recurrence.resume(run, moment)

    def note(self, run: Run) -> None:
        """Remember that the state is saved, whoever asked for it."""
        if self._recurrence is not None:
            self._recurrence.last = moment(run.progress)

    def ask_when_due(self, run: Run) -> None:
        """Ask within an epoch, and at its end."""
        if self.every is not None and self.every(run):
            run.control.request_save(str(self.every))

    def finish(self, run: Run) -> None:
        """Ask at the end, unless that is saved anyway, or nothing was trained."""
        if self._recurrence is None or not run.progress.batches:
            return
        if is_unsaved(run, self._recurrence):
            run.control.request_save("at the end")
            self.note(run)  # the state is held before the save

    def state_dict(self) -> dict[str, Any]:
        """Return when it was last saved, and what is due next."""
        return {} if self._recurrence is None else {"every": self._recurrence.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the run has its new origin."""
        if self._recurrence is not None:
            self._recurrence.load_state_dict(state.get("every", {}))
