"""The result of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..events import History, Position, Progress, Status
from ..events.progress import describe_untracked, verified


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """Facts and measurements about the resume of a run.

    Attributes:
        untracked: path and type of state that no checkpoint has and that may influence the training.
        differences: differences from the run that saved, in sentences: state, data, settings, versions.
        position: how the data reached their position: `seeked` directly, `replayed` by reading the epoch again, or
            `unknown`.
        path: the checkpoint file; None if the run started fresh or got a state.
        epoch: the epoch of the resume, None if the run started fresh.
        batch: the batch within the epoch.
        step: the number of optimizer steps before the resume.
        verified_steps: the number of repeated optimizer steps that are bitwise identical to those of the killed run.
        verified_before: date and steps of the newest earlier comparison of this run's program with itself, for example
            `2026-11-30, 37 steps`: by a rehearsal, by `verify-resume`, or by repeated steps; None without one.
        divergence: where the repeated steps first differ from the killed run, None if they do not.
        unverified: why repeated steps were not compared, None if they were or no step was repeated.
        restored: paths of state that no `state_dict` covers, restored from the checkpoint.
        edited: paths of such state that the program sets to another value than the run that saved; they keep it.
        fresh_plugins: plugins without state in the checkpoint.
        unclaimed_states: states in the checkpoint without a plugin.
        world_sizes: the number of ranks before and after the resume; None if the run started fresh.
    """

    untracked: Mapping[str, str] = field(default_factory=dict)
    differences: tuple[str, ...] = ()
    position: Position = "seeked"
    path: Path | None = None
    epoch: int | None = None
    batch: int | None = None
    step: int | None = None
    verified_steps: int = 0
    verified_before: str | None = None
    divergence: str | None = None
    unverified: str | None = None
    restored: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()
    fresh_plugins: tuple[str, ...] = ()
    unclaimed_states: tuple[str, ...] = ()
    world_sizes: tuple[int, int] | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why the resumed run may differ from the uninterrupted one, in sentences; empty if none is known."""
        return (*describe_untracked(self.untracked), *self.differences)

    @property
    def measured(self) -> str:
        """The outcome of comparing repeated steps, in words."""
        if text := self.divergence or self.unverified:
            return text
        return verified(self.verified_steps) if self.verified_steps else "nothing to verify: no step was repeated"

    def __str__(self) -> str:
        from .result_views import resume_line

        return resume_line(self)


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """How a run ended; `print` shows a summary, `repr` one line, a notebook that line with the summary folded in.

    Attributes:
        status: `completed`, `stopped` on purpose, `interrupted`, or `failed` (for plugins only: `fit` raises a
            failure).
        reason: why it ended.
        stopped_by: the plugin or caller that requested the stop, None unless stopped.
        stopped_on_rank: the rank that requested the stop, None if all ranks did.
        progress: the counters at the end.
        metrics: the latest value of every metric.
        means: the mean of each training value over the whole training, such as `train/loss`: over all samples,
            including those before a resume. Empty if nothing is logged.
        log_history: a row for each step at which something was logged or measured: `step`, `epoch` (with the completed
            fraction) and the metrics, as in `pandas.DataFrame(result.log_history)`. A validation adds its duration and
            throughput, `validation/seconds` and `validation/samples_per_second`. At most the newest 10,000 rows,
            including those before a resume, except for values that depend on the clock.
        best_checkpoint: the file of the best state, if one was kept.
        last_checkpoint: the file of the newest state, if one was written.
        recording: the recording, if a plugin wrote one.
        history: every request to the control, with its source and reason.
        seconds: wall time of this call.
        exit_status: the exit status for the process: 0, 130 if interrupted, 1 if failed, or the one a plugin requested.
        notes: lines by plugins, such as the resumed checkpoint and skipped files.
        warnings: requested things that did not happen, in sentences; empty if there are none.
        resume: facts about a resume: untracked state, differences, and the comparison of repeated steps; None without
            training.
        plugin_errors: the tolerated errors of observer plugins.
        plugin_seconds: time in each plugin's handlers, if `HandlerTimes` measured it.
        predictions: the outputs of `predict` for all samples; None for other runs, and without `gather`.
    """

    status: Status
    reason: str
    stopped_by: str | None
    progress: Progress
    metrics: dict[str, float]
    best_checkpoint: Path | None
    last_checkpoint: Path | None
    history: History
    seconds: float
    exit_status: int = 0
    stopped_on_rank: int | None = None
    recording: Path | None = None
    resume: ResumeReport | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    plugin_errors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    plugin_seconds: dict[str, float] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    log_history: list[dict[str, float]] = field(default_factory=list)
    predictions: Any = field(default=None, compare=False)  # tensors compare element by element

    def __str__(self) -> str:
        from .result_views import summary

        return summary(self)

    def __repr__(self) -> str:
        from .result_views import line

        return line(self)

    def _repr_html_(self) -> str:
        from .result_views import html

        return html(self)

    def explain(self) -> str:
        """Return how and why the run ended, as `python -m heliograph explain` does.

        Uses the recording, if any; otherwise this result: how the run ended, the requests, the notes.
        """
        from ..plugins.discovery import find
        from ..plugins.providers import how_to_install

        try:
            explain = find("result", "heliograph.explainers").load()
        except LookupError:
            raise ImportError(f"No installed package explains runs. {how_to_install('recorder')}") from None
        return str(explain(self))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields for `json.dump`; paths become text, and so do numbers that JSON lacks, such as NaN."""
        from .result_views import json_value

        return {item.name: json_value(getattr(self, item.name)) for item in fields(self)}

    def plot(self, path: str | Path | None = None, *, names: Sequence[str] = ()) -> Any:
        """Draw the curves of `log_history`; return the matplotlib figure.

        There is a panel for each name, such as `loss` for `train/loss`, `validation/loss` and `validation/<set>/loss`.

        Args:
            path: a file to save it to, such as `curves.png`.
            names: what to draw; by default all values that do not depend on the clock.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing was logged, or nothing with such a name.
        """
        from .result_views import plot

        return plot(self.log_history, path, names)


class StrictError(RuntimeError):
    """With `Trainer(strict=True)`: something that was requested did not happen, or cannot.

    Attributes:
        warnings: the warnings, in sentences.
        result: the result of the run, None if it did not begin.
    """

    def __init__(self, warnings: tuple[str, ...], result: RunResult | None = None) -> None:
        super().__init__(warnings, result)  # all arguments, so that it can be pickled
        self.warnings, self.result = warnings, result

    def __str__(self) -> str:
        return " ".join(self.warnings)


def check_line(method: str, text: str) -> str:
    """Return a line for the notes or warnings of a run; raise TypeError if it is not text."""
    if not isinstance(text, str):
        raise TypeError(f"run.{method} takes a line of text, got {type(text).__name__}: format it first.")
    return text
