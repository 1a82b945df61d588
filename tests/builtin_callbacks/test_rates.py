"""Samples, steps and tokens per second."""

from __future__ import annotations

from heliograph import Progress
from heliograph.events.progress import Rates


def test_rates_are_measured_from_call_to_call() -> None:
    rates = Rates()
    assert rates.read(Progress(samples=8, steps=2), 1.0) == {}
    assert rates.read(Progress(samples=24, steps=6), 3.0) == {"samples_per_second": 8.0, "steps_per_second": 2.0}
    assert rates.read(Progress(samples=24, steps=6), 9.0) == {}, "nothing was trained on"
    assert rates.read(Progress(samples=32, steps=8), 3.0) == {}, "no time has passed"
    assert rates.read(Progress(samples=32, steps=8, tokens=500), 5.0) == {
        "samples_per_second": 4.0,
        "steps_per_second": 1.0,
        "tokens_per_second": 250.0,
    }


def test_they_are_measured_from_where_they_were_started() -> None:
    rates = Rates()
    rates.start(Progress(samples=4, tokens=10), 2.0)
    assert rates.read(Progress(samples=8, steps=1, tokens=30), 4.0) == {
        "samples_per_second": 2.0,
        "steps_per_second": 0.5,
        "tokens_per_second": 10.0,
    }
