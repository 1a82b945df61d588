"""EarlyStopping: what counts as an improvement, NaN, missing metrics, resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from heliograph import (
    At,
    BatchEnd,
    EarlyStopping,
    Every,
    Lane,
    LogSchedule,
    Plugin,
    Run,
    RunResult,
    SavePoint,
    SaveSchedule,
    ShouldStop,
    Trainer,
    TrainStart,
    ValidationEnd,
    ValidationSchedule,
    on,
)
from heliograph.tests import kit
from heliograph.tests.messages import assert_facts

Make = Callable[..., Any]
Fit = Callable[..., RunResult]


@pytest.fixture
def fit(scripted: Make, batches: Make, sgd: Any) -> Fit:
    """Return a function that validates after each of as many epochs as there are values."""

    def run(stopper: EarlyStopping, values: Sequence[float], *plugins: Any, name: str = "loss", **options: Any) -> Any:
        trainer = Trainer([ValidationSchedule(Every(epochs=1)), stopper, *plugins], device="cpu")
        options.setdefault("epochs", len(values))
        return trainer.fit(scripted(values, name), batches(1), validation=batches(1), optimizer=sgd, **options)

    return run


def saving(folder: Path) -> list[Plugin]:
    return kit.saving(folder, Every(epochs=1), resume="auto")


class AtLeast(Plugin):
    """Puts a stop off until four epochs are done."""

    @on(ShouldStop)
    def postpone(self, run: Run, event: ShouldStop) -> None:
        if run.progress.epoch < 4:
            run.control.veto_stop("fewer than 4 epochs")


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([1.0, 0.95, 0.90, 0.85], {"min_delta": 0.1}, 4),  # cumulative progress counts
        ([1.0, 0.95, 0.95, 0.95, 0.1], {"min_delta": 0.1}, 4),
        ([1.0, 1.0, 1.0, 1.0, 0.1], {}, 4),  # an equal value is not an improvement
        ([1.0, 1.1, 1.2, 0.9, 1.1, 1.2, 1.3, 0.1], {}, 7),
        ([1.0, 2.0, 0.1], {"patience": 1}, 2),
        ([0.1, 0.2, 0.3, 0.4], {"mode": "max"}, 4),
        ([0.4, 0.3, 0.2, 0.1, 0.9], {"mode": "max"}, 4),
        ([0.1, 0.15, 0.19, 0.25], {"mode": "max", "min_delta": 0.1}, 4),
        ([math.nan, math.nan, 1.0, 2.0], {}, 4),
        ([math.nan, math.nan, math.nan, 1.0], {}, 3),
        ([1.0, math.nan, 1.0, math.nan, 0.1], {}, 4),
        ([1.0, math.nan, 0.9], {"nan": "stop"}, 2),
        ([math.inf, 1.0, 0.5], {"patience": 1}, 3),
        ([math.inf, math.inf, 0.5], {"patience": 1}, 2),
    ],
)
def test_stops_after_the_reading_that_it_should(
    fit: Fit, values: list[float], options: dict[str, Any], epochs: int
) -> None:
    result = fit(EarlyStopping(**options), values)

    assert result.progress.epoch == epochs
    assert (result.status == "stopped") == (epochs < len(values) or options.get("patience") == epochs)


def test_a_log_is_no_reading_of_a_validation_metric(fit: Fit) -> None:
    stopper = EarlyStopping(patience=2)
    result = fit(stopper, [1.0, 1.1, 1.2, 1.3], LogSchedule(Every(steps=1)))

    assert (result.progress.epoch, stopper.failed_readings) == (3, 2)


def test_the_result_says_who_stopped_and_why(fit: Fit) -> None:
    result = fit(EarlyStopping(patience=2), [0.5, 0.6, 0.7, 0.8])

    assert result.stopped_by == "early_stopping"
    assert_facts(result.reason, "validation/loss", "0.5", "2 checks")


def test_one_reading_is_one(fit: Fit) -> None:
    assert_facts(fit(EarlyStopping(patience=1), [0.5, 0.6]).reason, "validation/loss", "0.5", "1 check")


def test_a_validation_of_several_sets_is_one_check_of_the_set_that_is_named() -> None:
    class Script(Plugin):
        @on(ValidationEnd, lane=Lane.MEASURE)
        def worsen(self, run: Run, event: ValidationEnd) -> None:
            event.metrics["validation/day/loss"] = 1.0 + run.progress.epoch
            event.metrics["validation/night/loss"] = 1.0 / run.progress.epoch

    def stopped_at(name: str) -> int:
        plugins = [Script(), EarlyStopping(f"validation/{name}/loss", patience=2), ValidationSchedule(Every(epochs=1))]
        sets = {"day": kit.class_batches(2), "night": kit.class_batches(1)}
        return kit.fit(*plugins, validation=sets, epochs=6).progress.epoch

    assert (stopped_at("day"), stopped_at("night")) == (3, 6)


def test_the_reason_without_any_number_yet(fit: Fit) -> None:
    result = fit(EarlyStopping(patience=2), [math.nan, math.nan, 1.0])

    assert_facts(result.reason, "validation/loss", "not a number", "2 checks")


def test_nan_stop_says_so(fit: Fit) -> None:
    assert fit(EarlyStopping(nan="stop"), [0.5, math.nan, 0.1]).reason == "validation/loss is NaN"


def test_nan_raise(fit: Fit) -> None:
    with pytest.raises(ValueError, match="validation/loss is NaN"):
        fit(EarlyStopping(nan="raise"), [0.5, math.nan, 0.1])


def test_the_reference_moves_only_on_real_improvements(fit: Fit) -> None:
    stopper = EarlyStopping(min_delta=0.1, patience=9)
    fit(stopper, [1.0, 0.95, 0.91, 0.89, 0.80])

    assert stopper.best == 0.89
    assert stopper.failed_readings == 1


def test_another_metric(fit: Fit) -> None:
    stopper = EarlyStopping("validation/accuracy", mode="max", patience=1)

    assert fit(stopper, [0.5, 0.6, 0.4, 0.9], name="accuracy").progress.epoch == 3
    assert stopper.best == 0.6


def test_a_missing_metric_lists_and_suggests(fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"'validation/acuracy'.*Did you mean 'validation/accuracy'") as info:
        fit(EarlyStopping("validation/acuracy", mode="max"), [0.5, 0.5], name="accuracy")

    assert "Known: validation/accuracy" in str(info.value)


def test_without_validation_data_it_is_an_error_at_the_start(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([EarlyStopping(), ValidationSchedule(Every(epochs=1))], device="cpu")
    seen: list[int] = []
    trainer.bus.on(BatchEnd, lambda run, event: seen.append(run.progress.batch))

    with pytest.raises(ValueError, match="validation data: pass validation="):
        trainer.fit(task(), batches(), optimizer=sgd, epochs=2)
    assert seen == []


def test_a_train_metric_is_read_at_each_log(task: Make, batches: Make, sgd: Any) -> None:
    stopper = EarlyStopping("train/loss", patience=2, min_delta=1e9)
    trainer = Trainer([stopper, LogSchedule(Every(steps=2))], device="cpu")
    result = trainer.fit(task(), batches(), optimizer=sgd)  # endless but for the stop

    assert result.status == "stopped"
    assert result.progress.steps == 6
    assert stopper.best is not None


def test_a_train_metric_that_nobody_logs_is_an_error_at_the_start(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([EarlyStopping("train/loss")], device="cpu")

    with pytest.raises(ValueError, match="add LogSchedule"):
        trainer.fit(task(), batches(), optimizer=sgd, epochs=2)


def test_a_train_metric_is_not_read_from_validations(fit: Fit) -> None:
    stopper = EarlyStopping("train/loss", patience=1, mode="max", min_delta=1e9)
    result = fit(stopper, [1.0, 2.0, 3.0], LogSchedule(Every(steps=100), at_end=True))

    assert result.status == "completed"
    assert stopper.failed_readings == 0
    assert stopper.best == result.metrics["train/loss"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patience": 0}, "patience.*least 1; got 0"),
        ({"patience": 1.5}, "patience.*whole number"),
        ({"nan": "ignore"}, "nan is 'worse', 'stop'"),
        ({"mode": "smallest"}, "mode='min'"),
        ({"min_delta": -0.1}, "min_delta.*at least 0"),
        ({"min_delta": math.nan}, "min_delta.*at least 0"),
        ({"monitor": "loss"}, "<split>/<name>"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EarlyStopping(**options)


def test_state_round_trip() -> None:
    stopper, other = EarlyStopping(), EarlyStopping()
    stopper.best, stopper.failed_readings = 0.25, 2
    other.load_state_dict(stopper.state_dict())

    assert stopper.state_dict() == other.state_dict()
    assert stopper.state_dict().items() >= {"best": 0.25, "failed_readings": 2}.items()
    assert (other.best, other.failed_readings) == (0.25, 2)


def test_the_count_continues_after_a_resume(fit: Fit, tmp_path: Path) -> None:
    values = [1.0, 1.1, 1.2, 1.3, 1.4]

    first = fit(EarlyStopping(patience=3), values, *saving(tmp_path), epochs=2)
    second = fit(EarlyStopping(patience=3), values[2:], *saving(tmp_path), epochs=5)

    assert first.status == "completed"
    assert (second.status, second.progress.epoch) == ("stopped", 4)


def test_a_stopped_run_resumed_stops_at_once_unless_patience_was_raised(fit: Fit, tmp_path: Path) -> None:
    first = fit(EarlyStopping(patience=2), [1.0, 1.1, 1.2, 0.1], *saving(tmp_path))
    files = sorted(tmp_path.iterdir())
    again = fit(EarlyStopping(patience=2), [], *saving(tmp_path), epochs=4)
    assert (first.progress.steps, first.status) == (3, "stopped")
    assert (again.progress.steps, again.status, again.stopped_by) == (3, "stopped", "early_stopping")
    assert again.reason == first.reason
    assert sorted(tmp_path.iterdir()) == files

    raised = fit(EarlyStopping(patience=3), [0.9], *saving(tmp_path), epochs=4)
    assert (raised.progress.steps, raised.status) == (4, "completed")


def test_a_run_stopped_by_a_nan_resumed_stops_at_once(fit: Fit, tmp_path: Path) -> None:
    first = fit(EarlyStopping(nan="stop"), [1.0, math.nan, 0.5, 0.4], *saving(tmp_path))
    again = fit(EarlyStopping(nan="stop"), [0.5, 0.4], *saving(tmp_path), epochs=4)
    assert (first.progress.epoch, first.status) == (2, "stopped")
    assert (again.progress.epoch, again.status, again.stopped_by) == (2, "stopped", "early_stopping")
    assert "NaN" in again.reason

    forgiven = fit(EarlyStopping(nan="worse"), [0.5, 0.4], *saving(tmp_path), epochs=4)
    assert (forgiven.progress.epoch, forgiven.status) == (4, "completed")


def test_a_lowered_patience_stops_a_resumed_run_that_nobody_had_stopped(fit: Fit, tmp_path: Path) -> None:
    first = fit(EarlyStopping(patience=3), [1.0, 1.1, 1.2], *saving(tmp_path))
    lowered = fit(EarlyStopping(patience=2), [0.1], *saving(tmp_path), epochs=4)
    assert (first.status, first.progress.epoch) == ("completed", 3)
    assert (lowered.status, lowered.progress.epoch, lowered.stopped_by) == ("stopped", 3, "early_stopping")


def test_a_stopped_run_continues_without_the_plugin_that_stopped_it(fit: Fit, tmp_path: Path) -> None:
    first = fit(EarlyStopping(patience=2), [1.0, 1.1, 1.2, 0.1], *saving(tmp_path))
    other = fit(EarlyStopping(patience=2).named("another"), [0.1], *saving(tmp_path), epochs=4)
    assert (first.status, first.progress.epoch) == ("stopped", 3)
    assert (other.status, other.progress.epoch) == ("completed", 4)


def test_a_stop_that_was_postponed_until_the_metric_improved_is_not_repeated(fit: Fit, tmp_path: Path) -> None:
    first = fit(EarlyStopping(patience=2), [1.0, 1.1, 1.2, 0.5], *saving(tmp_path), AtLeast())
    rest = fit(EarlyStopping(patience=2), [0.4], *saving(tmp_path), AtLeast(), epochs=5)
    assert (first.status, first.progress.epoch) == ("completed", 4)
    assert (rest.status, rest.progress.epoch) == ("completed", 5)


@pytest.mark.parametrize(
    ("values", "options", "ended"),
    [
        ([5.0, 6.0, 7.0, 4.0, 3.0, 2.0], {}, ("completed", 6)),
        ([5.0, 6.0, 7.0, 8.0, 9.0, 2.0], {}, ("stopped", 4)),
        ([5.0, 6.0, 7.0, 4.0, 6.0, 7.0, 2.0], {}, ("stopped", 6)),  # withdrawn, then requested again
        ([5.0, math.nan, 4.0, 3.0, 2.0], {"nan": "stop"}, ("completed", 5)),
        ([5.0, math.nan, 6.0, 5.5, 2.0], {"nan": "stop"}, ("stopped", 4)),
        ([5.0, 6.0, 7.0, 4.9, 2.0], {"min_delta": 0.5}, ("stopped", 4)),
    ],
)
def test_a_vetoed_stop_is_withdrawn_when_the_metric_improves(
    fit: Fit, values: list[float], options: dict[str, Any], ended: tuple[str, int]
) -> None:
    result = fit(EarlyStopping(patience=2, **options), values, AtLeast())
    assert (result.status, result.progress.epoch) == ended
    withdrawals = [request.by for request in result.history if request.verb == "withdraw_stop"]
    assert withdrawals == ["early_stopping"] * (4.0 in values)


class StopsAt(Plugin):
    """Requests a stop when so many epochs are done."""

    asks = ("stop",)

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    @on(ValidationEnd, lane=Lane.REPORT)
    def stop(self, run: Run, event: ValidationEnd) -> None:
        if run.progress.epoch == self.epoch:
            run.control.stop("enough")


@pytest.mark.parametrize("epoch", [2, 3])
def test_an_improvement_does_not_withdraw_the_stop_of_another_plugin(fit: Fit, epoch: int) -> None:
    result = fit(EarlyStopping(patience=2), [5.0, 6.0, 7.0, 4.0, 3.0], AtLeast(), StopsAt(epoch))
    assert (result.status, result.progress.epoch, result.reason) == ("stopped", 4, "enough")
    assert result.stopped_by == "stops_at"


def test_each_of_two_withdraws_its_own_stop(fit: Fit) -> None:
    strict = EarlyStopping(patience=2, min_delta=2.0).named("strict")
    result = fit(EarlyStopping(patience=2), [5.0, 6.0, 7.0, 4.0, 3.5], AtLeast(), strict)
    assert (result.status, result.progress.epoch, result.stopped_by) == ("stopped", 4, "strict")


def test_a_second_fit_starts_again(scripted: Make, batches: Make, sgd: Any) -> None:
    stopper = EarlyStopping(patience=2)
    trainer = Trainer([ValidationSchedule(Every(epochs=1)), stopper], device="cpu")

    def fit(values: list[float]) -> RunResult:
        return trainer.fit(scripted(values), batches(1), validation=batches(1), optimizer=sgd, epochs=len(values))

    assert fit([0.1, 0.2, 0.3, 0.4]).status == "stopped"
    assert fit([5.0, 4.0, 3.0]).status == "completed"
    assert (stopper.best, stopper.failed_readings) == (3.0, 0)


def test_fit_then_validate_and_test(scripted: Make, batches: Make, sgd: Any) -> None:
    stopper = EarlyStopping(patience=3)
    trainer = Trainer([ValidationSchedule(Every(epochs=1)), stopper], device="cpu")
    trainer.fit(scripted([1.0, 0.5]), batches(1), validation=batches(1), optimizer=sgd, epochs=2)
    tested = trainer.test(scripted([9.0]), batches(1))

    assert tested.status == "completed"
    assert stopper.best == 0.5


def test_at_start_validations_do_not_count_twice_in_a_resumed_run(scripted: Make, batches: Make, sgd: Any) -> None:
    """A resumed run is not before its first batch: one more check would stop it before the uninterrupted one."""
    saved: dict[str, Any] = {}

    def fit(*, resumed: bool) -> EarlyStopping:
        stopper = EarlyStopping(patience=9)
        plugins = [ValidationSchedule(Every(epochs=1), at_start=True), stopper, SaveSchedule(At(epochs=1))]
        trainer = Trainer(plugins, device="cpu")
        if resumed:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        else:
            trainer.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
        trainer.fit(scripted([1.0] * 9), batches(2), validation=batches(1), optimizer=sgd, epochs=3)
        return stopper

    assert fit(resumed=False).failed_readings == 3
    assert fit(resumed=True).failed_readings == 3


def test_another_metric_at_a_resume_starts_again_and_says_so(tmp_path: Path) -> None:
    def fit(epochs: int, *stop: EarlyStopping, resume: str | None = None) -> RunResult:
        schedules = [ValidationSchedule(Every(epochs=1)), LogSchedule(Every(epochs=1))]
        saving = kit.saving(tmp_path, Every(epochs=1), resume=resume)
        task = kit.linear_classifier(metrics={"accuracy": lambda outputs, targets: 100.0})
        return kit.fit(*schedules, *saving, *stop, task=task, epochs=epochs, validation=kit.class_batches(1))

    fit(1, EarlyStopping("validation/loss", patience=9))
    resumed = fit(4, EarlyStopping("validation/accuracy", patience=2, mode="max"), resume="auto")

    assert (resumed.status, resumed.progress.epoch) == ("stopped", 4)  # 100 at the second epoch is the best
    assert any("again: it monitored validation/loss" in line for line in resumed.notes)
