"""Filters that count fractions of a run, and intervals that begin later."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

import pytest
from heliograph import (
    At,
    BatchEnd,
    Between,
    Checkpoint,
    EpochEnd,
    Every,
    Filter,
    Plugin,
    RNGCapture,
    Run,
    SaveSchedule,
    StepEnd,
    Trainer,
    ValidationEnd,
    on,
)
from heliograph.core.checkpoint.storage.reader import load
from heliograph.tests.kit import class_batches, fit, linear_classifier
from heliograph.tests.messages import assert_facts
from hypothesis import given, settings
from hypothesis import strategies as st


def steps_of(when: Filter, batches: int = 10, *plugins: Any, **options: Any) -> list[int]:
    """Return the steps at whose end a filter lets a batch's end through."""
    trainer, steps = Trainer(plugins, device="cpu"), list[int]()
    trainer.bus.on(BatchEnd, lambda run, event: steps.append(run.progress.steps), when=when)
    fit(trainer, train=class_batches(batches), **({"epochs": 2} | options))
    return steps


# Fractions of the planned steps.


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        (Every(fraction=0.1), list(range(2, 21, 2))),
        (Every(fraction=0.3), [6, 12, 18]),
        (Every(fraction=1), [20]),
        (Every(fraction=0.01), list(range(1, 21))),  # several fall into one step
        (Every(fraction=0.1, after=0.75), [16, 18, 20]),
        (Every(fraction=0.25, after=0.5), [10, 15, 20]),
        (At(fraction=[0.5, 0.9]), [10, 18]),
        (At(fraction=0.01), [1]),
        (Between(fraction=(0.2, 0.3)), [4, 5, 6]),
    ],
)
def test_a_fraction_is_of_the_planned_steps(when: Filter, steps: list[int]) -> None:
    assert steps_of(when) == steps


def test_it_is_rounded_up_to_a_step() -> None:
    assert steps_of(Every(fraction=0.3), 7, epochs=1) == [3, 5, 7]  # 2.1, 4.2 and 6.3
    assert steps_of(At(fraction=0.5), epochs=1.5) == [8]


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 60))
def test_one_nth_of_a_run_comes_at_each_nth(planned: int, parts: int) -> None:
    """However floats are rounded."""
    when = Every(fraction=1 / parts)
    when._planned = planned
    found, count = [], 0.0
    while (count := when.due_after(count)) <= planned:
        found.append(count)
    assert found == sorted({ceil(planned * part / parts) for part in range(1, parts + 1)})


@pytest.mark.parametrize("where", ["handler", "function", "schedule", "checkpoint"])
def test_it_is_refused_at_the_start_where_the_length_is_unknown(where: str, tmp_path: Path) -> None:
    class Often(Plugin):
        @on(EpochEnd, when=Every(fraction=0.5))
        def act(self, run: Run, event: EpochEnd) -> None:
            raise AssertionError("too late")

    plugins: dict[str, list[Any]] = {
        "handler": [Often()],
        "function": [],
        "schedule": [SaveSchedule(fraction=0.5), Checkpoint(tmp_path)],
        "checkpoint": [Checkpoint(tmp_path, every=Every(fraction=0.5))],
    }
    trainer, batches = Trainer(plugins[where], device="cpu"), list[int]()
    if where == "function":
        trainer.bus.on(EpochEnd, lambda run, event: None, when=Every(fraction=0.5))
    trainer.bus.on(BatchEnd, lambda run, event: batches.append(run.progress.batches))
    with pytest.raises(
        ValueError,
        match=r"loader .*: pass steps=",
    ):
        fit(trainer, train=iter(class_batches(4)), epochs=1)
    assert batches == []


def test_outside_of_a_training_it_lets_nothing_through() -> None:
    seen = []
    trainer = Trainer(device="cpu")
    trainer.bus.on(ValidationEnd, lambda run, event: seen.append(event), when=Every(fraction=0.5))
    trainer.validate(linear_classifier(), class_batches(2))
    assert seen == []


@pytest.mark.parametrize("value", [0, -0.5, 1.5, True, float("nan")])
def test_a_fraction_is_more_than_0_and_at_most_1(value: float) -> None:
    with pytest.raises(ValueError, match=r"argument of Every\(fraction=\.\.\.\)"):
        Every(fraction=value)


def test_it_says_what_it_counts() -> None:
    assert_facts(Every(fraction=0.1), "every 0.1", "run")
    assert_facts(Every(fraction=0.1, after=0.5), "every 0.1", "run", "after 0.5")
    assert_facts(At(fraction=[0.5, 0.9]), "at 0.5, 0.9", "run")


class Marks(Plugin):
    """Notes the steps at which filters let something through."""

    affects_training = False

    def __init__(self) -> None:
        self.steps: list[int] = []

    @on(StepEnd, when=Every(fraction=0.2))
    def note(self, run: Run, event: StepEnd) -> None:
        self.steps.append(run.progress.steps)


def resume_at(folder: Path, *lengths: float) -> list[list[int]]:
    """Return the marks of each attempt of a run of 10 batches an epoch, saved at its end."""
    found = []
    for epochs in lengths:
        marks = Marks()
        plugins = [RNGCapture(), SaveSchedule(epochs=100), Checkpoint(folder, resume="auto"), marks]
        fit(*plugins, train=class_batches(10), epochs=epochs)
        found.append(marks.steps)
    return found


def test_a_longer_run_has_the_fractions_of_its_own_length(tmp_path: Path) -> None:
    assert resume_at(tmp_path, 1, 2.5) == [[2, 4, 6, 8, 10], [15, 20, 25]]


def test_what_is_due_is_saved_with_the_length_that_it_is_of(tmp_path: Path) -> None:
    resume_at(tmp_path, 1)
    saved, *_ = tmp_path.glob("*.pth")
    assert load(saved)["filters"]["marks"]["note/step_end"] == {
        "rule": "every 0.2 fraction of 10 steps",
        "due": 12,
        "emissions": 0,
    }


# Intervals that begin later.


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        (Every(steps=3, after=9), [9, 12, 15, 18]),
        (Every(steps=3, after=10), [12, 15, 18]),
        (Every(steps=3, after=2), [3, 6, 9, 12, 15, 18]),
        (Every(batches=5, after=11), [15, 20]),
        (Every(emissions=4, after=9), [12, 16, 20]),
        (Every(samples=12, after=30), [12, 16, 20]),  # batches have 3 samples
        (Every(steps=3, after=50), []),
    ],
)
def test_nothing_comes_before_after_and_then_the_multiples(when: Filter, steps: list[int]) -> None:
    assert steps_of(when) == steps


def test_epochs_count_from_the_end_of_an_epoch() -> None:
    trainer, epochs = Trainer(device="cpu"), list[int]()
    trainer.bus.on(EpochEnd, lambda run, event: epochs.append(event.epoch), when=Every(epochs=1, after=3))
    fit(trainer, epochs=5)
    assert epochs == [2, 3, 4]


def test_after_is_checked_as_the_counter_is() -> None:
    with pytest.raises(ValueError, match=r"^after= of Every\(steps=\.\.\.\) must"):
        Every(steps=2, after=1.5)
    assert str(Every(steps=1, after=5)) == "every step after 5"
    assert_facts(Every(steps=2, after=5), "every 2 steps", "after 5")


def test_a_resumed_run_waits_as_long(tmp_path: Path) -> None:
    class Late(Marks):
        name = "late"

        @on(StepEnd, when=Every(steps=2, after=7))
        def note(self, run: Run, event: StepEnd) -> None:
            self.steps.append(run.progress.steps)

    found = []
    for steps in (3, 9, 12):
        late = Late()
        fit(RNGCapture(), SaveSchedule(steps=100), Checkpoint(tmp_path, resume="auto"), late, steps=steps)
        found.append(late.steps)
    assert found == [[], [8], [10, 12]]
