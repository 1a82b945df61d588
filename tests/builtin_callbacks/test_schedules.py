"""The three schedules: when they ask, at the start, at the end, after a resume."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import heliograph.events.progress as progress_module
import pytest
from heliograph import (
    At,
    BatchEnd,
    BatchStart,
    Between,
    Checkpoint,
    EpochEnd,
    Every,
    GradientAccumulation,
    Log,
    LogSchedule,
    Once,
    Plugin,
    RNGCapture,
    Run,
    SavePoint,
    SaveSchedule,
    ShouldStop,
    TrainEnd,
    Trainer,
    TrainStart,
    ValidationEnd,
    ValidationSchedule,
    on,
)
from heliograph.tests.messages import assert_each

Make = Callable[..., Any]


@pytest.fixture
def served(task: Make, batches: Make, sgd: Any) -> Callable[..., list[int]]:
    """Return a function that fits 5 batches of 4 an epoch, and returns the batches done at each log."""

    def run(schedule: LogSchedule, *plugins: Any, epochs: int = 2, saved: Any = None, **options: Any) -> list[int]:
        trainer = Trainer([schedule, *plugins], device="cpu")
        places: list[int] = []
        trainer.bus.on(Log, lambda run, event: places.append(run.progress.batches))
        if saved:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        trainer.fit(task(), batches(5), optimizer=sgd, epochs=epochs, **options)
        return places

    return run


@pytest.mark.parametrize(
    ("when", "places"),
    [
        (Every(steps=1), [*range(1, 11)]),
        (Every(steps=3), [3, 6, 9]),
        (Every(steps=5), [5, 10]),
        (Every(epochs=1), [5, 10]),
        (Every(epochs=2), [10]),
        (Every(samples=12), [3, 6, 9]),
        (Every(samples=10), [3, 5, 8, 10]),
        (Every(batches=4), [4, 8]),
        (At(steps=[2, 7]), [2, 7]),
        (At(epochs=1), [5]),
        (Between(steps=(3, 5)), [3, 4, 5, 5]),
        (Once(), [1]),
    ],
)
def test_when(served: Make, when: Any, places: list[int]) -> None:
    if isinstance(when, Between):
        assert sorted(set(served(LogSchedule(when)))) == sorted(set(places))
    else:
        assert served(LogSchedule(when)) == places


@pytest.mark.parametrize(
    ("counter", "places"),
    [
        ({"steps": 3}, [3, 6, 9]),
        ({"epochs": 1}, [5, 10]),
        ({"samples": 12}, [3, 6, 9]),
        ({"fraction": 0.25}, [3, 5, 8, 10]),
        ({"steps": 2, "after": 5}, [6, 8, 10]),
        ({"steps": 4, "at_start": True, "at_end": True}, [0, 4, 8, 10]),
    ],
)
def test_a_counter_in_place_of_a_filter(served: Make, counter: Any, places: list[int]) -> None:
    assert served(LogSchedule(**counter)) == places


def test_a_counter_is_in_the_words_of_the_plan_as_its_filter_is() -> None:
    assert str(LogSchedule(steps=50).filter) == str(Every(steps=50))
    assert str(SaveSchedule(seconds=600).filter) == "every 600 seconds"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: LogSchedule(Every(steps=1), steps=2), TypeError, "filter,.*got Every.*steps=2"),
        (lambda: LogSchedule(), TypeError, "takes an interval.*got nothing"),
        (lambda: LogSchedule(at_end=True), TypeError, "LogSchedule takes an interval"),
        (
            lambda: LogSchedule(step=2),  # type: ignore[call-arg]  # a mistake
            TypeError,
            "'step'. Did you mean 'steps'",
        ),
        (lambda: LogSchedule(steps=2, epochs=1), ValueError, "Every takes exactly one counter, got steps, epochs"),
        (lambda: LogSchedule(steps=0), ValueError, "must be a whole number, at least 1; got 0"),
    ],
)
def test_a_counter_that_makes_no_sense_is_refused(make: Make, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_steps_are_optimizer_steps(served: Make) -> None:
    assert served(LogSchedule(Every(steps=2)), GradientAccumulation(2)) == [4, 7, 10]


@pytest.mark.parametrize(
    ("when", "places"),
    [
        (Every(steps=4), [0, 4, 8]),
        (Every(epochs=1), [0, 5, 10]),
    ],
)
def test_at_start(served: Make, when: Any, places: list[int]) -> None:
    assert served(LogSchedule(when, at_start=True)) == places


@pytest.mark.parametrize(
    ("when", "places"),
    [
        (Every(steps=4), [4, 8, 10]),
        (Every(steps=5), [5, 10]),  # no double
        (Every(epochs=1), [5, 10]),
        (Every(epochs=3), [10]),
        (Every(steps=100), [10]),
    ],
)
def test_at_end(served: Make, when: Any, places: list[int]) -> None:
    assert served(LogSchedule(when, at_end=True)) == places


def saves(task: Make, batches: Make, sgd: Any, *schedules: Any, epochs: int = 2, saved: Any = None) -> list[Any]:
    """Return where a run of 5 batches an epoch was saved, as (epochs, batches), and the states."""
    trainer = Trainer(schedules, device="cpu")
    found: list[Any] = []

    def look(run: Run, event: SavePoint) -> None:
        found.append(((run.progress.epoch, run.progress.batches), deepcopy(run.state_dict())))

    trainer.bus.on(SavePoint, look)
    if saved:
        trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
    trainer.fit(task(), batches(5), optimizer=sgd, epochs=epochs)
    return found


@pytest.mark.parametrize(
    ("when", "places"),
    [
        (Every(steps=5), [(0, 5), (1, 10), (2, 10)]),  # what happens at an epoch's end is in the last one
        (Every(steps=4), [(0, 4), (1, 8), (2, 10)]),
        (Every(epochs=1), [(1, 5), (2, 10)]),  # no double
    ],
)
def test_a_save_before_the_last_epoch_s_end_does_not_stand_for_one_after_it(
    when: Any, places: list[Any], task: Make, batches: Make, sgd: Any
) -> None:
    found = saves(task, batches, sgd, SaveSchedule(when, at_end=True))
    assert [place for place, _ in found] == places

    for number, (_, state) in enumerate(found):
        rest = saves(task, batches, sgd, SaveSchedule(when, at_end=True), saved=state)
        assert [place for place, _ in rest] == places[number + 1 :]


def test_a_run_that_is_stopped_within_an_epoch_is_not_saved_twice(task: Make, batches: Make, sgd: Any) -> None:
    class Stop(Plugin):
        @on(BatchEnd)
        def stop(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == 7:
                run.control.stop("enough")

    found = saves(task, batches, sgd, SaveSchedule(Every(steps=7), at_end=True), Stop())
    assert [place for place, _ in found] == [(1, 7)]


def test_at_both_ends(served: Make) -> None:
    assert served(LogSchedule(Every(steps=100), at_start=True, at_end=True)) == [0, 10]


@pytest.mark.parametrize(("stop", "places"), [(7, [4, 7]), (8, [4, 8])])
def test_at_end_of_a_stopped_run(task: Make, batches: Make, sgd: Any, stop: int, places: list[int]) -> None:
    trainer = Trainer([LogSchedule(Every(steps=4), at_end=True)], device="cpu")
    seen: list[int] = []

    def leave(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == stop:
            run.control.stop("enough")

    trainer.bus.on(BatchEnd, leave)
    trainer.bus.on(Log, lambda run, event: seen.append(run.progress.batches))
    trainer.fit(task(), batches(5), optimizer=sgd, epochs=2)

    assert seen == places


def test_at_end_of_a_failed_run_asks_nothing(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([LogSchedule(Every(steps=100), at_end=True)], device="cpu")
    seen: list[int] = []
    trainer.bus.on(Log, lambda run, event: seen.append(run.progress.batches))

    def fail(run: Run, event: BatchEnd) -> None:
        raise ArithmeticError

    trainer.bus.on(BatchEnd, fail)
    with pytest.raises(ArithmeticError):
        trainer.fit(task(), batches(5), optimizer=sgd, epochs=1)

    assert seen == []


def test_seconds(served: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch takes four seconds after its BatchEnd; what is due lies on multiples of ten, at EpochEnd too."""
    now = [0.0]
    monkeypatch.setattr(progress_module, "monotonic", lambda: time.monotonic() + now[0])

    class Clock(LogSchedule):
        name = "clock"

        def ask(self, run: Run, reason: str) -> None:
            now[0] += 4.0

    assert served(LogSchedule(Every(seconds=10)), Clock(Every(batches=1))) == [4, 5, 9, 10]


def test_the_three_ask_for_what_they_are_named_for(task: Make, batches: Make, sgd: Any) -> None:
    plugins = [ValidationSchedule(Every(steps=2)), LogSchedule(Every(steps=3)), SaveSchedule(Every(epochs=1))]
    trainer = Trainer(plugins, device="cpu")
    seen: list[tuple[str, int]] = []
    trainer.bus.on(Log, lambda run, event: seen.append(("log", run.progress.steps)))
    trainer.bus.on(ValidationEnd, lambda run, event: seen.append(("validation", run.progress.steps)))
    trainer.bus.on(SavePoint, lambda run, event: seen.append(("save", run.progress.steps)))
    result = trainer.fit(task(), batches(6), validation=batches(1), optimizer=sgd, epochs=1)

    assert seen == [
        ("validation", 2),
        ("log", 3),
        ("validation", 4),
        ("log", 6),
        ("validation", 6),
        ("save", 6),
    ]
    assert {(each.by, each.verb, each.reason) for each in result.history} == {
        ("validation_schedule", "validation", "every 2 steps"),
        ("log_schedule", "log", "every 3 steps"),
        ("save_schedule", "save", "every epoch"),
    }


def cut(task: Make, batches: Make, sgd: Any, batch: int, *plugins: Any) -> dict[str, Any]:
    """Return the state of a run after so many batches."""
    saved: dict[str, Any] = {}
    trainer = Trainer([SaveSchedule(At(batches=batch), at_end=False).named("cut"), *plugins], device="cpu")
    trainer.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
    trainer.fit(task(), batches(5), optimizer=sgd, epochs=4)
    assert saved["progress"]["earlier_batches"] + saved["progress"]["batch"] == batch
    return saved


@pytest.mark.parametrize("place", [2, 3, 4, 5, 6, 7, 9, 10, 11])
@pytest.mark.parametrize(
    "when",
    [{"steps": 3}, {"steps": 5}, {"epochs": 1}, {"epochs": 2}, {"samples": 10}, {"samples": 12}, {"batches": 4}],
)
def test_a_resumed_run_neither_drifts_nor_doubles(
    served: Make, task: Make, batches: Make, sgd: Any, place: int, when: dict[str, int]
) -> None:
    whole = served(LogSchedule(Every(**when), at_end=True), epochs=3)
    resumed = served(LogSchedule(Every(**when), at_end=True), epochs=3, saved=cut(task, batches, sgd, place))

    before_its_epoch_end = "epochs" in when and place % 5 == 0
    if before_its_epoch_end:  # the cut at an epoch's last batch lies before its EpochEnd, which is reported again
        assert resumed in (
            [each for each in whole if each >= place],
            [each for each in whole if each > place],
        )
        assert len(resumed) == len(set(resumed))
    else:
        assert resumed == [each for each in whole if each > place]


def test_an_epoch_cut_after_its_end_is_not_reported_again(served: Make, task: Make, batches: Make, sgd: Any) -> None:
    saved: dict[str, Any] = {}
    trainer = Trainer([SaveSchedule(At(epochs=2), at_end=False)], device="cpu")
    trainer.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
    trainer.fit(task(), batches(5), optimizer=sgd, epochs=3)

    assert served(LogSchedule(Every(epochs=1)), epochs=4, saved=saved) == [15, 20]


def test_a_resumed_run_is_not_at_its_start(served: Make, task: Make, batches: Make, sgd: Any) -> None:
    saved = cut(task, batches, sgd, 4)

    assert served(LogSchedule(Every(steps=6), at_start=True), saved=saved) == [6]


def test_a_finished_run_resumed_asks_nothing(served: Make, task: Make, batches: Make, sgd: Any) -> None:
    saved: dict[str, Any] = {}
    trainer = Trainer(device="cpu")
    trainer.bus.on(TrainEnd, lambda run, event: saved.update(deepcopy(run.state_dict())))
    trainer.fit(task(), batches(5), optimizer=sgd, epochs=2)

    assert served(LogSchedule(Every(steps=1), at_end=True), saved=saved) == []


def states(task: Make, batches: Make, sgd: Any, event: Any, schedule: LogSchedule) -> list[dict[str, Any]]:
    """Return the state of a run of two epochs at every emission of an event."""
    trainer = Trainer([schedule], device="cpu")
    found: list[dict[str, Any]] = []
    trainer.bus.on(event, lambda run, event: found.append(deepcopy(run.state_dict())))
    trainer.fit(task(), batches(5), optimizer=sgd, epochs=2)
    return found


def test_what_was_done_at_the_start_is_not_done_again(served: Make, task: Make, batches: Make, sgd: Any) -> None:
    at_start = states(task, batches, sgd, ShouldStop, LogSchedule(Every(steps=4), at_start=True))[0]

    assert at_start["progress"]["batch"] == 0
    assert served(LogSchedule(Every(steps=4), at_start=True), saved=at_start) == [4, 8]


def test_what_is_due_at_the_end_is_done_after_a_resume_after_the_last_batch(
    served: Make, task: Make, batches: Make, sgd: Any
) -> None:
    last = states(task, batches, sgd, EpochEnd, LogSchedule(Every(steps=4), at_end=True))[1]

    assert served(LogSchedule(Every(steps=4), at_end=True), saved=last) == [10]


def test_what_became_due_before_the_cut_and_was_not_asked_since_is_done_after_it(
    served: Make, task: Make, batches: Make, sgd: Any
) -> None:
    """The tenth sample comes in the third batch, whose end the schedule slept through, as it was switched off."""
    schedule = LogSchedule(Every(samples=10))
    trainer = Trainer([schedule], device="cpu")
    saved: dict[str, Any] = {}

    def sleep(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 1:
            trainer.plugins.disable("log_schedule")
        if run.progress.batches == 3:
            trainer.plugins.enable("log_schedule")
            saved.update(deepcopy(run.state_dict()))

    trainer.bus.on(BatchEnd, sleep)
    trainer.fit(task(), batches(5), optimizer=sgd, epochs=1)

    assert served(LogSchedule(Every(samples=10)), saved=saved, epochs=1) == [4, 5]


def test_a_changed_interval_takes_effect(served: Make, task: Make, batches: Make, sgd: Any) -> None:
    saved = states(task, batches, sgd, BatchEnd, LogSchedule(Every(steps=9)))[3]

    assert served(LogSchedule(Every(steps=3)), saved=saved) == [6, 9]


def test_two_fits_on_one_trainer_and_a_test(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([LogSchedule(Every(steps=4), at_start=True, at_end=True)], device="cpu")
    seen: list[int] = []
    trainer.bus.on(Log, lambda run, event: seen.append(run.progress.batches))
    for _ in range(2):
        trainer.fit(task(), batches(5), optimizer=sgd, epochs=1)
    trainer.test(task(), batches(1))

    assert seen == [0, 4, 5] * 2


def test_a_skipped_batch_counts_as_a_batch_but_not_as_a_step(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([LogSchedule(Every(steps=2))], device="cpu")
    seen: list[int] = []
    trainer.bus.on(Log, lambda run, event: seen.append(run.progress.batches))

    def leave_out(run: Run, event: BatchStart) -> None:
        if run.progress.batch in (1, 2):
            run.control.skip_batch("the test says so")

    trainer.bus.on(BatchStart, leave_out)
    trainer.fit(task(), batches(6), optimizer=sgd, epochs=1)

    assert seen == [4, 6]


def test_what_is_switched_off_catches_up_once(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([LogSchedule(Every(steps=2))], device="cpu")
    seen: list[int] = []
    trainer.bus.on(Log, lambda run, event: seen.append(run.progress.batches))

    def toggle(run: Run, event: BatchEnd) -> None:
        if run.progress.batch == 2:
            trainer.plugins.disable("log_schedule")
        if run.progress.batch == 6:
            trainer.plugins.enable("log_schedule")

    trainer.bus.on(BatchEnd, toggle)
    trainer.fit(task(), batches(9), optimizer=sgd, epochs=1)

    assert seen == [2, 7, 8]


@pytest.mark.parametrize("when", [100, None, "every epoch"])
def test_what_is_no_filter_is_refused(when: Any) -> None:
    for kind in (LogSchedule, ValidationSchedule, SaveSchedule):
        with pytest.raises(TypeError, match=rf"interval, as in {kind.__name__}\(steps=100\)"):
            kind(when)


def test_two_of_a_kind_have_names_of_their_own(task: Make, batches: Make, sgd: Any) -> None:
    with pytest.raises(ValueError, match="registered"):
        Trainer([SaveSchedule(Every(steps=1)), SaveSchedule(Every(epochs=1))], device="cpu")
    trainer = Trainer([LogSchedule(Every(steps=4)), LogSchedule(Every(epochs=1)).named("epochs")], device="cpu")
    seen: list[int] = []
    trainer.bus.on(Log, lambda run, event: seen.append(run.progress.batches))
    ends: list[int] = []
    trainer.bus.on(EpochEnd, lambda run, event: ends.append(event.epoch))
    trainer.fit(task(), batches(5), optimizer=sgd, epochs=1)

    assert (seen, ends) == ([4, 5], [0])


@pytest.mark.parametrize("kind", [LogSchedule, ValidationSchedule, SaveSchedule])
@pytest.mark.parametrize(("at_end", "asks"), [(None, (0, 1, 1)), (True, (1, 1, 1)), (False, (0, 0, 0))])
def test_validations_and_saves_are_asked_for_at_the_end_unless_that_is_switched_off(
    task: Make, batches: Make, sgd: Any, kind: Any, at_end: bool | None, asks: tuple[int, ...]
) -> None:
    schedule = kind(Every(epochs=1), at_end=at_end)
    trainer = Trainer([schedule], device="cpu")
    result = trainer.fit(task(), batches(5), validation=batches(1) if kind is ValidationSchedule else None, optimizer=sgd, steps=3)  # fmt: skip  # noqa: E501

    expected = asks[(LogSchedule, ValidationSchedule, SaveSchedule).index(kind)]
    assert [each.reason for each in result.history] == ["at the end"] * expected


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LogSchedule(Every(steps=100)), {"log": 10}),
        (ValidationSchedule(Every(steps=300)), {"validation": 4}),  # and at the end
        (ValidationSchedule(Every(steps=300), at_start=True, at_end=False), {"validation": 4}),
        (SaveSchedule(Every(epochs=5)), {"save": 2}),
        (SaveSchedule(Every(epochs=50)), {"save": 1}),
        (SaveSchedule(At(steps=[1, 500])), {"save": 3}),
        (SaveSchedule(At(steps=[1, 1000])), {"save": 2}),
        (SaveSchedule(Every(samples=10)), {}),
    ],
)
def test_how_often_it_would_ask(schedule: Any, expected: dict[str, int]) -> None:
    assert schedule.forecast({"steps": 1000, "epochs": 10}) == expected


def test_without_validation_data_a_schedule_refuses_or_notes_it(task: Make, batches: Make, sgd: Any) -> None:
    with pytest.raises(ValueError, match="act without validation data:"):
        Trainer([ValidationSchedule(epochs=1)], device="cpu").fit(task(), batches(2), optimizer=sgd, epochs=1)
    trainer = Trainer([ValidationSchedule(epochs=1, at_start=True, required=False)], device="cpu")
    result = trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)
    assert (list(result.history), result.warnings) == ([], ())
    assert_each(result.notes, ["no validation data"])
    result = trainer.fit(task(), batches(2), validation=batches(1), optimizer=sgd, epochs=1)
    assert (result.progress.validations, result.notes) == (2, ())


def test_required_is_a_flag_of_validations_only() -> None:
    with pytest.raises(TypeError, match="False, got 1"):
        ValidationSchedule(epochs=1, required=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="LogSchedule has no argument"):
        LogSchedule(epochs=1, required=False)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"argument 'requird'\. Did"):
        ValidationSchedule(epochs=1, requird=False)  # type: ignore[call-arg]


def test_whether_data_are_required_may_change_at_a_resume(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    def train(epochs: int, **options: Any) -> Any:
        schedule = ValidationSchedule(epochs=1, **options)
        save = Checkpoint(tmp_path, every=Every(epochs=1), resume="auto")
        trainer = Trainer([RNGCapture(1), schedule, save], device="cpu")
        return trainer.fit(task(), batches(3), validation=batches(1), optimizer=sgd, epochs=epochs)

    train(1)
    result = train(2, required=False)
    assert result.resume.reasons == ()


def test_a_subclass_that_asks_in_its_own_way_is_called_at_every_batch(task: Make, batches: Make, sgd: Any) -> None:
    """What the schedule waits for is not what its override waits for."""

    class Mine(LogSchedule):
        def __init__(self) -> None:
            super().__init__(steps=4)
            self.calls: list[int] = []

        def ask_when_due(self, run: Run, event: BatchEnd | EpochEnd) -> None:
            self.calls.append(run.progress.steps)

    mine = Mine()
    Trainer([mine], device="cpu").fit(task(), batches(6), optimizer=sgd, epochs=1)
    assert mine.calls == [1, 2, 3, 4, 5, 6, 6]


def test_a_schedule_is_asked_where_one_is_due_only(
    monkeypatch: pytest.MonkeyPatch, task: Make, batches: Make, sgd: Any
) -> None:
    """At the others, one comparison does for all of them."""
    asked: list[int] = []
    ask = LogSchedule.ask_when_due

    def count(self: Any, run: Run, event: Any) -> None:
        asked.append(run.progress.steps)
        ask(self, run, event)

    monkeypatch.setattr(LogSchedule, "ask_when_due", functools.wraps(ask)(count))
    places: list[int] = []
    trainer = Trainer(
        [LogSchedule(steps=10), SaveSchedule(steps=15), LogSchedule(samples=64).named("other")], device="cpu"
    )
    trainer.bus.on(Log, lambda run, event: places.append(run.progress.steps))
    trainer.bus.on(SavePoint, lambda run, event: None)
    trainer.fit(task(), batches(40), optimizer=sgd, epochs=1)
    assert places == [10, 16, 20, 30, 32, 40]
    assert sorted(set(asked)) == [1, 10, 15, 16, 20, 30, 32, 40]
