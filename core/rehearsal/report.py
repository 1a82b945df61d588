"""The report of a rehearsal, and the predicted duration of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import mean
from textwrap import TextWrapper
from typing import Any

from ..checkpoint.compatibility import batch_factors, global_batch
from ..system.extras import printable_lines
from .trace import Fact

WRAPPED = TextWrapper(80, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
STEPS = 2  # of each epoch of a rehearsal, and batches of each validation set
UNITS = (("days", 86400.0), ("h", 3600.0), ("min", 60.0))


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
    """

    events: list[str] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    validations: list[tuple[float, int]] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    bytes: int | None = None


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
        resume: the report of the resume in a line; empty if nothing saves.
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
            lines += [f"GPU memory: {_bytes(self.gpu_bytes)} at most"]
        lines += [f"left out: {', '.join(self.left_out)}"] * bool(self.left_out)
        lines += [f"not redirected: {', '.join(self.unredirected)}"] * bool(self.unredirected)
        lines += [*self.notes, *(f"WARNING: {warning}" for warning in self.warnings)]
        lines += [f"PROBLEM: {problem}" for problem in self.problems] or ["no problems"]
        return printable_lines("\n".join([f"rehearsal of {self.plan}", *map(WRAPPED.fill, lines)]))

    def _done(self) -> str:
        counts = [
            (self.events.count("step_end"), "step"),
            (self.events.count("log"), "log"),
            (self.events.count("validation_end"), "validation"),
            (self.events.count("save_point"), "save"),
        ]
        parts = [f"{number} {word}{'s' * (number != 1)}" for number, word in counts if number]
        return ", ".join([*parts, f"a resume ({self.resume})" if self.resume else "no resume, because nothing saves"])

    def _duration(self) -> str:
        times = self.prediction
        parts = [
            f"{_number(times.steps)} steps of {_time(times.step_seconds)}, the first {_time(times.first_step_seconds)}",
            *_counted(times.validations, "validations", times.validation_seconds),
            *_counted(times.saves, "saves", times.save_seconds),
        ]
        total = "an unknown time" if self.seconds is None else f"about {_time(self.seconds)}"
        return f"{total}, roughly: {'; '.join(parts)}"

    def _size(self) -> str:
        if self.checkpoint_bytes is None:
            return "no checkpoints" if not self.redirected else f"to {self._places()}"
        most = "" if self.bytes is None else f", {_bytes(self.bytes)} at most"
        free = "" if self.free_bytes is None else f"; {_bytes(self.free_bytes)} are free"
        return f"checkpoints of {_bytes(self.checkpoint_bytes)}{most}{free}; to {self._places()}"

    def _places(self) -> str:
        return ", ".join(dict.fromkeys(str(path) for paths in self.redirected.values() for path in paths))


def _number(value: int | None) -> str:
    return "an unknown number of" if value is None else f"{value:,}"


def _counted(number: int | None, plural: str, seconds: float | None) -> list[str]:
    if number == 0:
        return []
    word = plural.removesuffix("s") if number == 1 else plural
    return [f"{_number(number)} {word}" + ("" if seconds is None else f" of {_time(seconds)}")]


def _time(seconds: float) -> str:
    for word, size in UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {word}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _bytes(size: int) -> str:
    value, units = float(size), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, _ = value / 1000, units.pop(0)
    return f"{value:.3g} {units[0]}"


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
    factors = batch_factors(run)
    limits = run.settings.limits
    lengths = [
        run.data.evaluation_length(loader, limits.get(name)) for name, loader in run.data.validation_loaders.items()
    ]
    return Planned(
        text=run.report.plan(),
        name=run.name,
        short=_short(run, len(run.settings.train)),
        totals=_totals(run, factors["accumulation"], global_batch(factors)),
        validation_batches=None if None in lengths else sum(lengths),
    )


def _short(run: Any, phases: int) -> dict[str, int | None]:
    if (
        run.length.max_epochs is None and None in run.data.lengths
    ):  # a scheduler that needs a length cannot count epochs
        return {"epochs": None, "steps": min(run.length.max_steps, STEPS * phases)}
    return {"epochs": phases}


def _totals(run: Any, window: int | None, samples: int | None) -> dict[str, float]:
    batches = run.length.batches_per_epoch if len(run.settings.train) == 1 else None
    steps_per_epoch = None if window is None or batches is None else ceil(batches / min(window, batches))
    totals: dict[str, float] = (
        {} if run.length.planned_steps is None else {"steps": run.length.planned_steps, "fraction": 1.0}
    )
    if run.length.max_epochs is not None and (run.length.max_steps is None or steps_per_epoch):
        totals["epochs"] = run.length.max_epochs
    if "steps" in totals and steps_per_epoch and batches is not None:
        totals["epochs"] = totals["steps"] // steps_per_epoch
        remaining_batches = totals["steps"] % steps_per_epoch * (window or 1)
        totals["batches"] = totals["epochs"] * batches + min(remaining_batches, batches)
        if samples is not None and window:
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
    first, later_steps = seen.steps[0], seen.steps[1:] or seen.steps
    steps, step = planned.totals.get("steps"), mean(later_steps)
    training = None if steps is None else first + (steps - 1) * step
    totals = planned.totals | ({} if training is None else {"seconds": training})
    times = _forecasts(plugins, totals)
    validation = _validation_seconds(planned, seen)
    save = min(seen.saves, default=None)
    counts = times.get("validation", 0), times.get("save", 0)
    validations, saves = (counts[0] if seen.validations else 0), (counts[1] if seen.saves else 0)
    parts = [
        training,
        *(_product(number, seconds) for number, seconds in ((validations, validation), (saves, save))),
    ]
    return Prediction(
        steps=None if steps is None else int(steps),
        step_seconds=step,
        first_step_seconds=first,
        validations=validations,
        validation_seconds=validation,
        saves=saves,
        save_seconds=save,
        seconds=None if None in parts else sum(seconds or 0.0 for seconds in parts),
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


def _validation_seconds(planned: Planned, seen: Seen) -> float | None:
    if not seen.validations or planned.validation_batches is None:
        return None
    seconds, batches = min(seen.validations)
    return seconds / max(batches, 1) * planned.validation_batches


def _product(number: int | None, seconds: float | None) -> float | None:
    if number == 0:
        return 0.0
    return None if number is None or seconds is None else number * seconds
