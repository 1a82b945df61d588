"""What a run returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from ..events import History, Progress
from ..events.catalogue import Status
from ..events.checks import printable
from ..events.resume_facts import Position, describe_untracked, verified


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What is known about the resume of a run: facts, and what was measured.

    Attributes:
        untracked: path and type of state that no checkpoint holds, and that may influence the training.
        differences: what is not as it was in the run that saved, in sentences: state, data, settings, versions.
        position: how the data reached their position: `seeked` at once, `replayed` by reading the epoch again, or
            `unknown`.
        path: the file that this run was resumed from, None if it started fresh or was given a state.
        epoch: where it was resumed, None if it started fresh.
        batch: where in the epoch.
        step: after which optimizer step.
        verified_steps: the repeated optimizer steps that are bitwise identical with those of the killed run; 0 if no
            step was repeated.
        divergence: where the repeated steps differ first from the killed run, None if they do not.
        restored: paths of state that no `state_dict` holds, restored from the checkpoint.
        edited: paths of such state that the program sets differently than the one that saved; it stays as it is now.
        fresh_plugins: plugins that found no state in the checkpoint.
        unclaimed_states: states in the checkpoint that no plugin claimed.
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
    divergence: str | None = None
    restored: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()
    fresh_plugins: tuple[str, ...] = ()
    unclaimed_states: tuple[str, ...] = ()
    world_sizes: tuple[int, int] | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the resumed run may differ from the uninterrupted one, in sentences; empty if nothing is known."""
        return (*describe_untracked(self.untracked), *self.differences)

    @property
    def measured(self) -> str:
        """What comparing repeated steps has shown, in words."""
        if self.divergence is not None:
            return self.divergence
        return verified(self.verified_steps) if self.verified_steps else "nothing to verify: no step was repeated"

    def __str__(self) -> str:
        facts = (*describe_untracked(self.untracked), *(f"different: {text}" for text in self.differences))
        if self.step is None:
            return printable("; ".join(facts or ("nothing is untracked",)))
        replayed = ["the data were read again up to the position"] if self.position == "replayed" and self.batch else []
        listed = ", ".join(self.edited[:MOST_NAMED]) + ", ..." * (len(self.edited) > MOST_NAMED)
        edited = [f"changed by the program: {listed}"] if self.edited else []
        return printable("; ".join([f"resumed at step {self.step:,}", self.measured, *replayed, *facts, *edited]))


MOST_NAMED = 3  # paths in a line


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """How a run ended; `print` shows a summary, `repr` one line, a notebook that line with the summary folded in.

    Attributes:
        status: `completed`, `stopped` on purpose, `interrupted`, or `failed` (seen by plugins only: a failure raises).
        reason: why it ended.
        stopped_by: who asked for the stop, None unless stopped.
        stopped_on_rank: which of several processes that was, None where all of them did.
        progress: the counters at the end.
        metrics: the latest value of every metric.
        means: the mean of each training value over the whole training, such as `train/loss`: over all samples, those
            before a resume included. Empty where nothing is logged.
        log_history: a row for each step at which something was logged or measured: `step`, `epoch` (with the part of
            the present one) and the metrics, as in `pandas.DataFrame(result.log_history)`. A validation adds how long
            it took and its throughput, `validation/seconds` and `validation/samples_per_second`. The newest 10,000
            rows, those before a resume included (but for what is by the clock).
        best_checkpoint: the file of the best state, if one was kept.
        last_checkpoint: the file of the newest state, if one was written.
        recording: where what happened is recorded, if a plugin recorded it.
        history: every request to the control, with who asked and why.
        seconds: wall time of this call.
        exit_status: what the process should exit with: 0, 130 if interrupted, 1 if failed, or what a plugin asked for.
        notes: lines by plugins: resumed from where, skipped what and why.
        warnings: what was asked for and did not happen, in sentences; empty when all is well.
        resume: what is known about a resume: untracked state, differences, and what repeated steps have shown; None
            without training.
        plugin_errors: the forgiven errors of observer plugins.
        plugin_seconds: time in each plugin's handlers, where `HandlerTimes` measured it.
        predictions: what `predict` computed for all samples; None of other runs, and without `gather`.
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
        place = self.progress
        lines = [
            f"{self._ending}: {self.reason}",
            f"epochs {place.epoch}, steps {place.steps}, samples {place.samples}, "
            f"{f'tokens {place.tokens}, ' if place.tokens else ''}{self.seconds:.1f} s",
        ]
        lines += [f"{name} {value:.6g}" for name, value in sorted(self.metrics.items())]
        lines += self._predicted()
        lines += [f"{label} checkpoint {path}" for label, path in self._checkpoints() if path]
        lines += self._worth()
        lines += self.notes
        lines += [f"WARNING: {warning}" for warning in self.warnings]
        lines += [f"plugin {name} failed: {error}" for name, errors in self.plugin_errors.items() for error in errors]
        return "\n".join(map(printable, lines))

    def __repr__(self) -> str:
        count = len(self.warnings)
        warned = f", {count} warning{'s' * (count > 1)}" if count else ""
        (done,) = self._predicted() or [f"epochs {self.progress.epoch}, steps {self.progress.steps}"]
        return printable(f"<RunResult: {self._ending}, {done}{warned}>")

    def _repr_html_(self) -> str:
        from html import escape

        warnings = "".join(f"<li>{escape(warning)}</li>" for warning in self.warnings)
        return (
            f"<details><summary>{escape(repr(self)[1:-1])}</summary><pre>{escape(str(self))}</pre></details>"
            + f"<ul>{warnings}</ul>" * bool(warnings)
        )

    @property
    def _ending(self) -> str:
        by = f" by {self.stopped_by}" if self.stopped_by else ""
        return self.status + by + (f" on rank {self.stopped_on_rank}" if self.stopped_on_rank is not None else "")

    def explain(self) -> str:
        """Return how and why the run ended, as `python -m heliograph explain` does: from its recording, if any.

        Without a recording, it is made from this result: how the run ended, who requested what, the notes.
        """
        from ..plugins.discovery import find
        from ..plugins.providers import how_to_install

        try:
            explain = find("result", "heliograph.explainers").load()
        except LookupError:
            raise ImportError(f"Nothing installed explains runs. {how_to_install('recorder')}") from None
        return str(explain(self))

    def _predicted(self) -> list[str]:
        if self.predictions is None:
            return []
        from .outputs.parts import shape_of

        return [f"predictions {shape_of(self.predictions)}"]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for `json.dump`: paths as text, and what JSON has no number for, such as NaN, too."""
        return {each.name: _to_json(getattr(self, each.name)) for each in fields(self)}

    def plot(self, path: str | Path | None = None, *, names: Sequence[str] = ()) -> Any:
        """Draw the curves of `log_history`; return the matplotlib figure.

        There is a panel for each name, such as `loss` for `train/loss`, `validation/loss` and `validation/<set>/loss`.

        Args:
            path: where to save it too, such as `curves.png`.
            names: what to draw; by default all but what is by the clock, such as `seconds`.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing was logged, or nothing of such a name.
        """
        from .metrics.log_rows import plot

        return plot(self.log_history, path, names)

    def _worth(self) -> list[str]:
        """Return a line about the resume of this run, or about one from its checkpoint."""
        if self.resume is None:
            return []
        if self.resume.epoch is not None:
            return [str(self.resume)]
        return [f"resumable: {self.resume}"] if self.last_checkpoint else []

    def _checkpoints(self) -> list[tuple[str, Path | None]]:
        return [("best", self.best_checkpoint), ("last", self.last_checkpoint)]


class StrictError(RuntimeError):
    """`Trainer(strict=True)`: something that was asked for did not happen, or cannot.

    Attributes:
        warnings: what, in sentences.
        result: how the run went, None where it was not begun.
    """

    def __init__(self, warnings: tuple[str, ...], result: RunResult | None = None) -> None:
        super().__init__(warnings, result)  # as given, so that it can be pickled
        self.warnings, self.result = warnings, result

    def __str__(self) -> str:
        return " ".join(self.warnings)


def check_line(method: str, text: str) -> str:
    """Return a line for the notes or the warnings of a run.

    Raises:
        TypeError: it is not text.
    """
    if not isinstance(text, str):
        raise TypeError(f"run.{method} takes a line of text, got {type(text).__name__}: format it first.")
    return text


def _to_json(value: Any) -> Any:
    """Return a value as JSON has it: of an object its public fields, of NaN, infinities and other objects the text."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        own = (each.name for each in fields(value) if not each.name.startswith("_"))
        return {name: _to_json(getattr(value, name)) for name in own}
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [_to_json(item) for item in value]
    return str(value)
