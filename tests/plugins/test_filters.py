from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from heliograph import At, Between, Every, Filter, Once, Trainer
from heliograph.events import BatchEnd, Progress, Run
from heliograph.events import progress as progress_module
from heliograph.tests.kit import Clock, class_batches, fit
from hypothesis import given, settings
from hypothesis import strategies as st

# What each counter is called in the progress; the seconds have tests of their own.
FIELDS = {
    "epochs": "epoch",
    "batches": "batch",
    "steps": "steps",
    "skipped_steps": "skipped_steps",
    "samples": "samples",
    "validations": "validations",
}


class FakeRun:
    """As much of a run as a filter asks for: where it is, and where it began."""

    def __init__(self, **counters: Any) -> None:
        self.progress = Progress(**counters)
        self.origin = self.progress.copy()

    def ask(self, condition: Filter, **counters: float) -> bool:
        for name, value in counters.items():
            setattr(self.progress, name, value)
        return condition(cast(Run, self))


def fired(condition: Filter, field: str, values: Sequence[int], start: int = 0) -> list[int]:
    """Return the values of a counter at which the filter lets an event through."""
    run = FakeRun(**{field: start})
    return [value for value in values if run.ask(condition, **{field: value})]


# Every.


@pytest.mark.parametrize("counter", FIELDS)
def test_every_n_of_any_counter(counter: str) -> None:
    assert fired(Every(**{counter: 3}), FIELDS[counter], range(11)) == [3, 6, 9]


def test_every_one_fires_at_each_count_but_not_before_the_first() -> None:
    assert fired(Every(steps=1), "steps", [0, 0, 1, 2, 3]) == [1, 2, 3]


def test_every_fires_once_per_crossing() -> None:
    assert fired(Every(steps=3), "steps", [2, 3, 3, 3, 4, 5, 6, 6]) == [3, 6]


def test_a_jump_over_several_due_values_fires_once_and_falls_back_into_the_rhythm() -> None:
    assert fired(Every(samples=100), "samples", [64, 128, 192, 256, 900, 964, 1028]) == [128, 256, 900, 1028]


def test_batches_are_counted_over_all_epochs() -> None:
    run, condition = FakeRun(), Every(batches=4)
    answers = [
        run.ask(condition, batch=batch, earlier_batches=earlier, epoch=earlier // 3)
        for earlier in (0, 3, 6)
        for batch in (1, 2, 3)
    ]
    assert [batches for batches, answer in enumerate(answers, 1) if answer] == [4, 8]


@pytest.mark.parametrize("start", [0, 1, 6, 7])
def test_a_resumed_run_neither_drifts_nor_fires_twice(start: int) -> None:
    uninterrupted = fired(Every(steps=3), "steps", range(1, 20))
    before = fired(Every(steps=3), "steps", range(1, start + 1))
    after = fired(Every(steps=3), "steps", range(start, 20), start=start)
    assert before + after == uninterrupted == [3, 6, 9, 12, 15, 18]


def test_one_object_in_two_runs_starts_again() -> None:
    condition = Every(steps=2)
    assert fired(condition, "steps", range(5)) == [2, 4]
    assert fired(condition, "steps", range(5)) == [2, 4]


def test_what_could_not_be_asked_in_time_catches_up_once() -> None:
    assert fired(Every(steps=10), "steps", [35, 36, 40, 41]) == [35, 40]


def test_every_of_the_emissions() -> None:
    run, condition = FakeRun(), Every(emissions=3)
    assert [run.ask(condition) for _ in range(7)] == [False, False, True, False, False, True, False]
    other = FakeRun(steps=50)
    assert [other.ask(condition) for _ in range(4)] == [False, False, True, False]


@settings(deadline=None)
@given(
    st.integers(min_value=1, max_value=20),
    st.integers(min_value=0, max_value=100),
    st.lists(st.integers(min_value=0, max_value=30), max_size=30),
)
def test_every_fires_exactly_when_the_quotient_grows(n: int, start: int, jumps: list[int]) -> None:
    counts = [start]
    for jump in jumps:
        counts.append(counts[-1] + jump)
    run, condition = FakeRun(samples=start), Every(samples=n)
    answers = [run.ask(condition, samples=count) for count in counts[1:]]
    assert answers == [count // n > former // n for former, count in pairwise(counts)]


@settings(deadline=None)
@given(st.lists(st.integers(min_value=1, max_value=60), min_size=1, max_size=4), st.integers(1, 60), st.data())
def test_at_fires_once_for_the_values_that_are_crossed(values: list[int], stop: int, data: st.DataObject) -> None:
    count, run, condition = 0, FakeRun(), At(steps=values)
    while count < stop:
        former, count = count, count + data.draw(st.integers(min_value=1, max_value=9))
        assert run.ask(condition, steps=count) == any(former < value <= count for value in values)


# Seconds.


class TimedRun(FakeRun):
    """A run whose clock is set by hand; it began after `earlier` seconds of former runs."""

    def __init__(self, clock: Clock, earlier: float = 0.0) -> None:
        super().__init__()
        self.clock = clock
        self.progress.load_state_dict({**Progress().state_dict(), "earlier_seconds": earlier})
        self.origin = self.progress.copy()

    def at(self, condition: Filter, seconds: float) -> bool:
        self.clock.now = 1000.0 + seconds
        return condition(cast(Run, self))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "monotonic", clock)
    return clock


def test_every_so_many_seconds(clock: Clock) -> None:
    run, condition = TimedRun(clock), Every(seconds=60)
    seconds = [0.1, 59.0, 61.0, 62.0, 119.0, 120.5, 400.0, 410.0, 425.0]
    assert [each for each in seconds if run.at(condition, each)] == [61.0, 120.5, 400.0, 425.0]


def test_seconds_may_be_a_fraction(clock: Clock) -> None:
    run, condition = TimedRun(clock), Every(seconds=0.5)
    assert [each for each in (0.25, 0.75, 0.875, 1.25) if run.at(condition, each)] == [0.75, 1.25]


def test_seconds_of_a_resumed_run_continue(clock: Clock) -> None:
    run, condition = TimedRun(clock, earlier=50.0), Every(seconds=60)
    assert [each for each in (1.0, 9.0, 11.0, 20.0, 71.0) if run.at(condition, each)] == [11.0, 71.0]


def test_seconds_that_passed_before_the_first_question_count(clock: Clock) -> None:
    run, condition = TimedRun(clock), Every(seconds=60)
    assert [each for each in (65.0, 66.0, 121.0) if run.at(condition, each)] == [65.0, 121.0]


# At, Between, Once.


def test_at_one_and_at_several() -> None:
    assert fired(At(steps=3), "steps", range(8)) == [3]
    assert fired(At(epochs=[1, 5, 3]), "epoch", range(8)) == [1, 3, 5]
    assert fired(At(steps=(2, 4)), "steps", [1, 5, 6]) == [5]  # crossed both, says it once
    assert fired(At(steps=(2, 4, 2)), "steps", range(8)) == [2, 4]


def test_at_in_a_resumed_run() -> None:
    assert fired(At(steps=[3, 6]), "steps", range(3, 9), start=3) == [6]
    assert fired(At(steps=[3, 6]), "steps", range(7, 9), start=7) == []


def test_at_emissions() -> None:
    run, condition = FakeRun(), At(emissions=[1, 3])
    assert [run.ask(condition) for _ in range(4)] == [True, False, True, False]


def test_between_includes_both_ends() -> None:
    assert fired(Between(epochs=(2, 4)), "epoch", [0, 1, 2, 2, 3, 4, 5]) == [2, 2, 3, 4]
    assert fired(Between(steps=(2, 2)), "steps", range(5)) == [2]


def test_between_in_a_resumed_run() -> None:
    assert fired(Between(steps=(2, 4)), "steps", [3, 3, 5], start=3) == [3, 3]


def test_between_emissions() -> None:
    run, condition = FakeRun(), Between(emissions=(2, 3))
    assert [run.ask(condition) for _ in range(5)] == [False, True, True, False, False]
    assert [FakeRun().ask(condition) for _ in range(2)] == [False, False]  # a new run counts again


def test_once_is_the_first_time_in_a_run() -> None:
    condition = Once()
    for run in (FakeRun(), FakeRun(steps=50)):
        assert [run.ask(condition) for _ in range(3)] == [True, False, False]


# States.


def gone_on(condition: Filter, before: FakeRun, **counters: int) -> FakeRun:
    """Return a run that is resumed where another one stands, with the filter's state."""
    state = condition.state_dict(before.origin)
    run = FakeRun(**counters)
    condition.load_state_dict(run.origin, state)
    return run


@pytest.mark.parametrize("cut", range(8))
@pytest.mark.parametrize(
    "make", [lambda: Every(emissions=3), lambda: At(emissions=[2, 5]), Once], ids=["every", "at", "once"]
)
def test_emissions_are_counted_across_a_resume(make: Any, cut: int) -> None:
    condition, run = make(), FakeRun()
    whole = [run.ask(condition) for _ in range(8)]
    first, second = make(), make()
    run = FakeRun()
    answers = [run.ask(first) for _ in range(cut)]
    state = first.state_dict(run.origin)
    run = FakeRun(steps=cut)
    second.load_state_dict(run.origin, state)

    assert answers + [run.ask(second) for _ in range(8 - cut)] == whole


def test_what_was_due_and_not_yet_asked_is_due_after_a_resume() -> None:
    condition, run = Every(steps=100), FakeRun()
    assert not run.ask(condition, steps=40)
    resumed = gone_on(condition, run, steps=103)  # asked at the ends of epochs only, say
    assert resumed.ask(condition, steps=120)
    assert not resumed.ask(condition, steps=199)


def test_a_filter_that_was_never_asked_has_a_state_all_the_same() -> None:
    condition, run = Every(steps=100), FakeRun()
    assert condition.state_dict(run.origin) == {"rule": "every 100 steps", "due": 100, "emissions": 0}
    assert gone_on(condition, run, steps=103).ask(condition)


def test_the_state_is_of_the_run_that_is_asked_for() -> None:
    condition, former = Once(), FakeRun()
    assert former.ask(condition)
    assert condition.state_dict(FakeRun().origin)["emissions"] == 0


def test_a_changed_filter_goes_by_its_new_rule() -> None:
    run, former, changed = FakeRun(), Every(steps=100), Every(steps=30)
    assert not run.ask(former, steps=50)
    resumed = FakeRun(steps=50)
    changed.load_state_dict(resumed.origin, former.state_dict(run.origin))
    assert [step for step in range(50, 125) if resumed.ask(changed, steps=step)] == [60, 90, 120]


def test_a_changed_filter_continues_counting_emissions() -> None:
    run, former, changed = FakeRun(), Every(emissions=4), Every(emissions=3)
    assert not run.ask(former)
    resumed = FakeRun()
    changed.load_state_dict(resumed.origin, former.state_dict(run.origin))
    assert [resumed.ask(changed) for _ in range(5)] == [False, True, False, False, True]


# Bad arguments.


@pytest.mark.parametrize("kind", [Every, At])
@pytest.mark.parametrize(
    "value", [0, -1, 2.5, 3.0, True, "3", None, float("nan"), float("inf"), [0], [1, -1], ["1"]], ids=repr
)
def test_counts_are_positive_whole_numbers(kind: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}\(steps=\.\.\.\) must"):
        kind(steps=value)


@pytest.mark.parametrize("kind", [Every, At])
@pytest.mark.parametrize("values", [torch.tensor(3), torch.tensor([3]), np.array(3), np.array([3.0])], ids=repr)
def test_tensors_and_arrays_that_are_no_counts_are_refused_with_a_sentence(kind: Any, values: Any) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}\(steps=\.\.\.\) must"):
        kind(steps=values)


@pytest.mark.parametrize(("value", "expected"), [(np.int64(3), [3]), (np.array([5, 3]), [3, 5])], ids=repr)
def test_numbers_of_numpy_are_counts(value: Any, expected: list[int]) -> None:
    assert At(steps=value).values == expected


@pytest.mark.parametrize("value", [0, -1.5, True, "3", None, float("nan"), float("inf")], ids=repr)
def test_seconds_are_a_positive_number(value: Any) -> None:
    with pytest.raises(ValueError, match="number, more than 0;"):
        Every(seconds=value)


def test_exactly_one_counter() -> None:
    with pytest.raises(ValueError, match="takes exactly one counter,"):
        Every()
    with pytest.raises(ValueError, match="takes exactly one counter,"):
        At(steps=3, epochs=2)
    with pytest.raises(ValueError, match=r"^Between takes exactly"):
        Between(steps=(1, 2), epochs=(1, 2))
    with pytest.raises(TypeError):
        Every(3)  # type: ignore[call-arg]


def test_an_unknown_counter_is_refused_with_the_nearest() -> None:
    counters = ["batches", "emissions", "epochs", "fraction", "samples", "seconds", "skipped_steps", "steps"]
    known = ", ".join([*counters, "tokens", "validations"])
    with pytest.raises(ValueError, match=rf"mean 'steps'\? Known: {known}\.$"):
        Every(step=3)
    with pytest.raises(ValueError, match=r"^Unknown counter 'epoch'\. Did"):
        Between(epoch=(1, 2))


@pytest.mark.parametrize("values", [(1, 2), [1, 2, 3]], ids=repr)
def test_every_takes_one_number(values: Any) -> None:
    with pytest.raises(ValueError, match=r"got .*: use"):
        Every(steps=values)


@pytest.mark.parametrize("values", [3, (1,), (1, 2, 3)], ids=repr)
def test_between_takes_two_numbers(values: Any) -> None:
    with pytest.raises(ValueError, match=r"^Between\(steps=\.\.\.\) takes two numbers,"):
        Between(steps=values)


def test_between_takes_the_lower_number_first() -> None:
    with pytest.raises(ValueError, match=r"first; got \(5, 2\)"):
        Between(epochs=(5, 2))


def test_between_needs_its_numbers_to_be_positive() -> None:
    with pytest.raises(ValueError, match=r"least 1; got -1\.$"):
        Between(steps=(-1, 2))


def test_a_filter_prints_what_it_waits_for() -> None:
    filters: list[Filter] = [Every(steps=100), Every(seconds=0.5), At(epochs=[5, 1]), Between(samples=(10, 20))]
    assert [str(each) for each in filters] == [
        "every 100 steps",
        "every 0.5 seconds",
        "at 1, 5 epochs",
        "between 10, 20 samples",
    ]


@pytest.mark.parametrize(
    ("condition", "reported"),
    [
        (Every(epochs=1), "every epoch"),
        (Every(batches=1), "every batch"),
        (Every(skipped_steps=1), "every skipped step"),
    ],
    ids=str,
)
def test_every_one_is_reported_in_the_singular(condition: Filter, reported: str) -> None:
    assert str(condition) == reported


def test_a_saved_state_knows_its_rule_by_a_text_that_does_not_change() -> None:
    condition, run = Every(epochs=1), FakeRun()
    assert condition.state_dict(run.origin)["rule"] == "every 1 epochs"
    condition.load_state_dict(run.origin, {"rule": "every 1 epochs", "due": 7, "emissions": 0})
    assert condition.state_dict(run.origin)["due"] == 7


# In a real run.


def test_filters_in_a_real_run() -> None:
    received: list[str] = []
    trainer = Trainer(device="cpu")
    filters = {"every": Every(batches=2), "at": At(samples=6), "between": Between(epochs=(1, 1)), "once": Once()}
    for name, condition in filters.items():

        def receive(run: Run, event: BatchEnd, name: str = name) -> None:
            received.append(f"{name} {run.progress.batches}")

        trainer.bus.on(BatchEnd, receive, when=condition)
    for _ in range(2):  # a second run of the trainer receives the same
        received.clear()
        fit(trainer, train=class_batches(3, size=2), epochs=2)
        # Samples are counted when the batch has ended, epochs when their loop has.
        assert received == ["once 1", "every 2", "at 3", "every 4", "between 4", "between 5", "every 6", "between 6"]


def test_a_snapshot_of_the_progress_is_no_new_run() -> None:
    run, condition = FakeRun(), Every(steps=2)
    assert run.ask(condition, steps=2)
    run.progress = replace(run.progress)
    assert not run.ask(condition, steps=2)


@pytest.mark.parametrize(
    ("condition", "times"),
    [
        (Every(steps=100), 10),
        (Every(steps=1001), 0),
        (Every(epochs=3), 3),
        (Every(seconds=0.5), 8),
        (Every(samples=10), None),
        (At(steps=[1, 500, 1000, 1001]), 3),
        (Between(epochs=(2, 5)), None),
        (Once(), None),
    ],
)
def test_how_often_a_filter_would_be_due(condition: Filter, times: int | None) -> None:
    """None where nobody knows before the run what it counts."""
    assert condition.times({"steps": 1000, "epochs": 10, "seconds": 4.2}) == times


@pytest.mark.parametrize("unit", ["steps", "batches", "epochs", "samples", "validations", "emissions"])
def test_a_shortened_filter_is_due_at_the_first_count(unit: str) -> None:
    for condition in (Every(**{unit: 1000}), At(**{unit: [500, 1000]}), Between(**{unit: (100, 200)})):
        run = FakeRun()
        condition.shorten()
        field = {} if unit == "emissions" else {FIELDS[unit]: 1}
        assert run.ask(condition, **field)


def test_a_shortened_filter_of_seconds_is_due_at_once(clock: Clock) -> None:
    run, condition = TimedRun(clock), Every(seconds=3600)
    condition.shorten()
    assert [each for each in (0.001, 0.002, 5.0) if run.at(condition, each)] == [0.001, 0.002, 5.0]
