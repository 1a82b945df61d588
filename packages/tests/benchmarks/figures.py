"""Figures: each is computed from what one process measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median, quantiles
from typing import Any

from heliograph.packages.tests.benchmarks.agreement import in_tens
from heliograph.packages.tests.benchmarks.harness import STEPS, Seconds, differences, per_step
from heliograph.packages.tests.benchmarks.lean import CONTROL, HAND

Figure = Callable[[Any], "float | Sequence[float]"]
ROUNDS_PER_SAVE = 10


def value(name: str) -> Figure:
    """Return the value of a name."""
    return lambda spent: spent[name]


def typical(name: str) -> Figure:
    """Return the median of the values of a name."""
    return lambda spent: median(spent[name])


def beyond(name: str, base: str) -> Figure:
    """Return the median of the differences to a base, value by value."""
    return lambda spent: median(mine - other for mine, other in zip(spent[name], spent[base], strict=True))


def apart(name: str, base: str) -> Figure:
    """Return the difference of the medians."""
    return lambda spent: median(spent[name]) - median(spent[base])


def multiple(name: str, base: str) -> Figure:
    """Return the quotient of the medians."""
    return lambda spent: median(spent[name]) / median(spent[base])


def least(name: str, base: str | None = None) -> Figure:
    """Return the least value, or what it is beyond the least of a base: of what only ever takes longer."""
    return lambda spent: min(spent[name]) - (min(spent[base]) if base else 0.0)


def tenth(name: str, base: str | None = None) -> Figure:
    """Return the value that nine tenths exceed, or what it is beyond that of a base."""
    return lambda spent: _tenth(spent[name]) - (_tenth(spent[base]) if base else 0.0)


def middle_half(name: str) -> Figure:
    """Return the values without the least and the greatest quarter: one process has measured in many others."""
    return lambda spent: sorted(spent[name])[len(spent[name]) // 4 : -(len(spent[name]) // 4) or None]


def step(name: str = HAND) -> Figure:
    """Return the median of a race, in microseconds a step."""
    return lambda seconds: per_step(seconds[name])


def step_beyond(name: str, base: str | None = None) -> Figure:
    """Return what a step takes beyond that of a base: by default the hand-written loop, which runs twice."""
    return lambda seconds: median(differences(seconds, name, *_bases(name, base)))


def step_ratio(name: str, base: str | None = None) -> Figure:
    """Return how many times as long as that of the base a step takes."""
    return lambda seconds: _ratio(seconds, name, _bases(name, base))


def with_saves(figure: Figure) -> Figure:
    """Return a figure of whole rounds from save to save."""

    def whole(seconds: Any) -> Any:
        return figure({name: _means(values) for name, values in seconds.items()})

    return whole


def whole_beyond(name: str, base: str) -> Figure:
    """Return what a step takes beyond that of a base, logs, validations and saves included."""
    return with_saves(step_beyond(name, base))


def between_saves(name: str) -> Figure:
    """Return the figure of the turns without a save."""
    return lambda seconds: _without_saves(_beyond_hand(seconds, name))


def at_save(name: str) -> Figure:
    """Return what a turn with a save takes longer than the others, beyond the hand-written loop's, in milliseconds."""

    def figure(seconds: Seconds) -> float:
        values = _beyond_hand(seconds, name)
        return (median(values[ROUNDS_PER_SAVE - 1 :: ROUNDS_PER_SAVE]) - _without_saves(values)) * STEPS / 1e3

    return figure


def each_step(name: str, base: str | None = None) -> Figure:
    """Return the median of the steps of all turns, or how many times that of a base it is."""
    return lambda turns: median(_steps(turns, name)) / (median(_steps(turns, base)) if base else 1.0)


def worst_step(name: str, base: str | None = None) -> Figure:
    """Return the 99th percentile of the steps of all turns, or how many times that of a base it is."""
    return lambda turns: _worst(turns, name) / (_worst(turns, base) if base else 1.0)


def each_step_beyond(name: str, base: str) -> Figure:
    """Return the median of the differences between ten steps of each, turn by turn: some vote in every tenth only."""
    return lambda turns: median(
        mine - other for mine, other in zip(in_tens(turns, name), in_tens(turns, base), strict=True)
    )


def worst_step_beyond(name: str, base: str) -> Figure:
    """Return the difference of the 99th percentiles."""
    return lambda turns: _worst(turns, name) - _worst(turns, base)


def of(key: str | int, figure: Figure) -> Figure:
    """Return the figure of a part of what was measured."""
    return lambda measured: figure(measured[key])


def _bases(name: str, base: str | None) -> list[str]:
    if base is not None:
        return [base]
    return [HAND] if name == CONTROL else [HAND, CONTROL]


def _ratio(seconds: Seconds, name: str, bases: list[str]) -> float:
    base = [fmean(each) for each in zip(*(seconds[other] for other in bases), strict=True)]
    return median(mine / other for mine, other in zip(seconds[name], base, strict=True))


def _beyond_hand(seconds: Seconds, name: str) -> list[float]:
    return differences(seconds, name, *_bases(name, None))


def _without_saves(values: list[float]) -> float:
    return median(value for index, value in enumerate(values) if (index + 1) % ROUNDS_PER_SAVE)


def _means(values: list[float]) -> list[float]:
    whole = range(0, len(values) - ROUNDS_PER_SAVE + 1, ROUNDS_PER_SAVE)
    return [fmean(values[begin : begin + ROUNDS_PER_SAVE]) for begin in whole]


def _tenth(values: list[float]) -> float:
    return quantiles(values, n=10)[0] if len(values) > 1 else values[0]


def _steps(turns: Any, name: str) -> list[float]:
    return [step for turn in turns[name] for step in turn]


def _worst(turns: Any, name: str) -> float:
    return quantiles(_steps(turns, name), n=100)[-1]
