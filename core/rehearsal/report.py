"""The report of a rehearsal, and the predicted duration of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import ceil
from pathlib import Path
from statistics import mean
from textwrap import TextWrapper
from typing import Any

from tqdm.std import tqdm

from ...events.checks import count
from ..checkpoint.schema import batch_factors, global_batch
from ..system.extras import printable_lines
from ..trace import Fact

WRAPPED = TextWrapper(80, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
format_sizeof = tqdm.format_sizeof
STEPS = 2  # of each epoch of a rehearsal, and batches of each validation set


@dataclass(slots=True)
class Seen:
    """The record of one run of a rehearsal.

    Attributes:
        events: the names of the events.
        facts: the facts to compare: the state at the first save, and everything after it.
        steps: seconds of each step.
        validations: seconds of each validation, and its batches.
        saves: seconds of each save.
        bytes: the size of the first checkpoint.
        result: the result of the run.
        targets: where the plugins would have written, by their names.
        gpu_bytes: the peak of tensor memory on the GPU; None on another device.
    """

    events: list[str] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    validations: list[tuple[float, int]] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    bytes: int | None = None
    result: Any = None
    targets: dict[str, list[Path]] = field(default_factory=dict)
    gpu_bytes: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Rehearsal:
    """The result of a rehearsal: problems, plan, duration and size of the run; `print` shows it.

    Attributes:
        name: the run's name.
        problems: what would go wrong, in sentences; empty if nothing would.
        warnings: warnings of the short run; some apply only to a short run.
        notes: notes of the short run, and objects that could not be restored.
        plan: what the run would do, as `run.report.plan()` says.
        prediction: its duration; rough, because each figure is measured once or twice.
        seconds: the total duration; None if its length is unknown.
        resume: the report of the resume in a line; empty if no plugin resumes.
        checkpoint_bytes: the size of one checkpoint; None if no plugin wrote one.
        bytes: the size of the checkpoints that exist at once, with the one being written; None if unknown.
        free_bytes: free space on the disk of the checkpoints, before the run.
        gpu_bytes: the peak of tensor memory on the GPU; None on another device.
        redirected: where plugins would write, by their names; the rehearsal wrote to a temporary folder.
        unredirected: plugins that hold a path and have no `rehearse(folder)`: they wrote to their usual path.
        left_out: plugins that took no part.
        events: the names of the events of the short run, in order.
        resumed_events: the events of the run that resumed it.
    """

    name: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    plan: str
    prediction: Prediction
    resume: str
    checkpoint_bytes: int | None
    bytes: int | None
    free_bytes: int | None
    gpu_bytes: int | None
    redirected: dict[str, list[Path]]
    unredirected: tuple[str, ...]
    left_out: tuple[str, ...]
    events: tuple[str, ...]
    resumed_events: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def seconds(self) -> float | None:
        """The predicted duration of the run; None if its length is unknown."""
        return self.prediction.seconds

    def __repr__(self) -> str:
        state = "ok" if self.ok else f"{len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        return f"<Rehearsal of {self.name!r}: {state}>"

    def __str__(self) -> str:
        lines = [f"rehearsed: {self._done()}", f"would take: {self._duration()}", f"would write: {self._size()}"]
        if self.gpu_bytes is not None:
            lines.append(f"GPU memory: {format_sizeof(self.gpu_bytes, 'B')} at most")
        if self.left_out:
            lines.append(f"left out: {', '.join(self.left_out)}")
        if self.unredirected:
            lines.append(f"not redirected: {', '.join(self.unredirected)}")
        lines += [*self.notes, *(f"WARNING: {warning}" for warning in self.warnings)]
        lines += [f"PROBLEM: {problem}" for problem in self.problems] or ["no problems"]
        return printable_lines("\n".join([f"rehearsal of {self.plan}", *map(WRAPPED.fill, lines)]))

    def _done(self) -> str:
        names = {"step": "step_end", "log": "log", "validation": "validation_end", "save": "save_point"}
        numbers = {word: self.events.count(event) for word, event in names.items()}
        parts = [count(number, word, f"{word}s") for word, number in numbers.items() if number]
        return ", ".join([*parts, f"a resume ({self.resume})" if self.resume else "no resume: no plugin can do it"])

    def _duration(self) -> str:
        times = self.prediction
        counts = (
            ("validations", times.validations, times.validation_seconds),
            ("saves", times.saves, times.save_seconds),
        )
        parts = [f"{_number(times.steps, 'steps')} of {_time(times.step_seconds)}"]
        parts[0] += f", the first {_time(times.first_step_seconds)}"
        for plural, number, seconds in counts:
            if number != 0:
                parts.append(_number(number, plural) + ("" if seconds is None else f" of {_time(seconds)}"))
        total = "an unknown time" if self.seconds is None else f"about {_time(self.seconds)}"
        return f"{total}, roughly: {'; '.join(parts)}"

    def _size(self) -> str:
        places = ", ".join(dict.fromkeys(str(path) for paths in self.redirected.values() for path in paths))
        if self.checkpoint_bytes is None:
            return f"to {places}" if places else "no checkpoints"
        most = "" if self.bytes is None else f", {format_sizeof(self.bytes, 'B')} at most"
        free = "" if self.free_bytes is None else f"; {format_sizeof(self.free_bytes, 'B')} are free"
        return f"checkpoints of {format_sizeof(self.checkpoint_bytes, 'B')}{most}{free}; to {places}"


def _number(value: int | None, plural: str) -> str:
    return f"an unknown number of {plural}" if value is None else f"{value:,} {plural}"


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a run.

    Attributes:
        text: the plan as text.
        name: the run's name.
        short: options of `fit` that shorten the run to one pass over each phase of the training data.
        totals: known totals of `epochs`, `batches`, `samples`, `steps`.
        validation_batches: batches of one validation in this process; None if unknown.
    """

    text: str
    name: str
    short: dict[str, int | None]
    totals: dict[str, float]
    validation_batches: int | None


def plan_of(run: Any) -> Planned:
    phases, limits = len(run.settings.train), run.settings.limits
    loaders = run.data.validation_loaders.items()
    lengths = [run.data.evaluations.length(loader, limits.get(name)) for name, loader in loaders]
    short: dict[str, int | None] = {"epochs": phases}
    if (
        run.length.max_epochs is None and None in run.data.lengths
    ):  # a scheduler that needs a length cannot count epochs
        short = {"epochs": None, "steps": min(run.length.max_steps, STEPS * phases)}
    return Planned(
        text=run.report.plan(),
        name=run.name,
        short=short,
        totals=_totals(run),
        validation_batches=None if None in lengths else sum(lengths),
    )


def _totals(run: Any) -> dict[str, float]:
    length, factors = run.length, batch_factors(run)
    steps, batches, window = length.planned_steps, length.batches_per_epoch, factors["accumulation"]
    totals = {"epochs": length.max_epochs} if length.max_epochs is not None and length.max_steps is None else {}
    if steps is None:
        return totals
    totals |= {"steps": steps, "fraction": 1.0}
    if window and batches and len(run.settings.train) == 1:
        steps_per_epoch = ceil(batches / min(window, batches))
        totals["epochs"], remaining_steps = divmod(steps, steps_per_epoch)
        totals["batches"] = totals["epochs"] * batches + min(remaining_steps * window, batches)
        if (samples := global_batch(factors)) is not None:
            totals["samples"] = totals["batches"] * samples // window
    return totals


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted duration of a run; None if unknown.

    Attributes:
        steps: the number of steps.
        step_seconds: of one step, measured on the second.
        first_step_seconds: of the first step, which may compile.
        validations: the number of validations.
        validation_seconds: of one validation with all its batches.
        saves: the number of saves.
        save_seconds: of one save.
        seconds: in total.
    """

    steps: int | None
    step_seconds: float
    first_step_seconds: float
    validations: int | None
    validation_seconds: float | None
    saves: int | None
    save_seconds: float | None
    seconds: float | None


def predict(planned: Planned, seen: Seen, plugins: Iterable[Any]) -> Prediction:
    first, step = seen.steps[0], mean(seen.steps[1:] or seen.steps)
    steps = planned.totals.get("steps")
    training = None if steps is None else first + (steps - 1) * step
    times = _forecasts(plugins, planned.totals | ({} if training is None else {"seconds": training}))
    validations = times.get("validation", 0) if seen.validations else 0
    saves = times.get("save", 0) if seen.saves else 0
    validation, save = None, min(seen.saves, default=None)
    if seen.validations and planned.validation_batches is not None:
        seconds, batches = min(seen.validations)
        validation = seconds / max(batches, 1) * planned.validation_batches
    parts = [training, _product(validations, validation), _product(saves, save)]
    return Prediction(
        steps=None if steps is None else int(steps),
        step_seconds=step,
        first_step_seconds=first,
        validations=validations,
        validation_seconds=validation,
        saves=saves,
        save_seconds=save,
        seconds=None if None in parts else sum(part or 0.0 for part in parts),
    )


def _forecasts(plugins: Iterable[Any], totals: Mapping[str, float]) -> dict[str, int | None]:
    # None if a plugin that makes requests cannot predict their number
    times: dict[str, int | None] = {}
    for plugin in plugins:
        forecast = plugin.forecast(totals) if hasattr(plugin, "forecast") else {}
        for word in ("validation", "save"):
            if word in forecast:
                before = times.get(word, 0)
                times[word] = None if before is None else max(before, forecast[word])
            elif word in getattr(plugin, "asks", ()) and "stop" not in getattr(plugin, "asks", ()):
                times[word] = None
    return times


def _product(number: int | None, seconds: float | None) -> float | None:
    if number == 0:
        return 0.0
    return None if number is None or seconds is None else number * seconds
