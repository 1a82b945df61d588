"""How long a run would be, counted and in seconds, as far as that is known before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import mean
from typing import Any

from ..checkpoint.state.compatibility import batch_factors, global_batch
from .director import STEPS, Seen


@dataclass(frozen=True, slots=True)
class Planned:
    """What a run was to be.

    Attributes:
        text: its plan.
        name: the run's name.
        short: the options of `fit` that make it so short that each phase of the training data is read once.
        totals: what it would count, where that is known: `epochs`, `batches`, `samples`, `steps`.
        validation_batches: of one validation, of this process; None where that is unknown.
    """

    text: str
    name: str
    short: dict[str, int | None]
    totals: dict[str, float]
    validation_batches: int | None


def plan_of(run: Any) -> Planned:
    """Return what a run that is not entered would be."""
    factors = batch_factors(run)
    limits = run.settings.limits
    lengths = [run.data.evaluation_length(each, limits.get(name)) for name, each in run.validation_loaders.items()]
    return Planned(
        text=run.plan(),
        name=run.name,
        short=_short(run, len(run.settings.train)),
        totals=_totals(run, factors["accumulation"], global_batch(factors)),
        validation_batches=None if None in lengths else sum(lengths),
    )


def _short(run: Any, phases: int) -> dict[str, int | None]:
    if run.max_epochs is None and None in run.data.lengths:  # schedulers that need a length know none by epochs
        return {"epochs": None, "steps": min(run.max_steps, STEPS * phases)}
    return {"epochs": phases}


def _totals(run: Any, window: int | None, samples: int | None) -> dict[str, float]:
    batches = run.batches_per_epoch if len(run.settings.train) == 1 else None
    a_step = None if window is None or batches is None else ceil(batches / min(window, batches))
    totals: dict[str, float] = {} if run.planned_steps is None else {"steps": run.planned_steps, "fraction": 1.0}
    if run.max_epochs is not None and (run.max_steps is None or a_step):
        totals["epochs"] = run.max_epochs
    if "steps" in totals and a_step and batches is not None:
        totals["epochs"] = totals["steps"] // a_step
        rest = totals["steps"] % a_step * (window or 1)
        totals["batches"] = totals["epochs"] * batches + min(rest, batches)
        if samples is not None and window:
            totals["samples"] = totals["batches"] * samples // window
    return totals


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long a run would last; None where that is not known.

    Attributes:
        steps: how many.
        step_seconds: of one, measured on the second.
        first_step_seconds: of the first, which may compile.
        validations: how many.
        validation_seconds: of one with all its batches.
        saves: how many.
        save_seconds: of one.
        seconds: of all of it.
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
    """Return how long a run would last, from what a short one took."""
    first, rest = seen.steps[0], seen.steps[1:] or seen.steps
    steps, step = planned.totals.get("steps"), mean(rest)
    training = None if steps is None else first + (steps - 1) * step
    totals = planned.totals | ({} if training is None else {"seconds": training})
    times = _forecasts(plugins, totals)
    validation = _validation_seconds(planned, seen)
    save = min(seen.saves, default=None)
    counts = times.get("validation", 0), times.get("save", 0)
    validations, saves = (counts[0] if seen.validations else 0), (counts[1] if seen.saves else 0)
    parts = [
        training,
        *(_product(number, each) for number, each in ((validations, validation), (saves, save))),
    ]
    return Prediction(
        steps=None if steps is None else int(steps),
        step_seconds=step,
        first_step_seconds=first,
        validations=validations,
        validation_seconds=validation,
        saves=saves,
        save_seconds=save,
        seconds=None if None in parts else sum(each or 0.0 for each in parts),
    )


def _forecasts(plugins: Iterable[Any], totals: Mapping[str, float]) -> dict[str, int | None]:
    """Return how often each thing would be requested; None where a plugin that requests it cannot say."""
    times: dict[str, int | None] = {}
    for plugin in plugins:
        own = plugin.forecast(totals) if hasattr(plugin, "forecast") else {}
        for word in ("validation", "save"):
            if word in own:
                before = times.get(word, 0)
                times[word] = None if before is None else max(before, own[word])
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
