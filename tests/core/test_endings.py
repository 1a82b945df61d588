"""How runs end: every kind of ending, and failures in every place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    EpochEnd,
    ExceptionPassThrough,
    Lane,
    Plugin,
    Run,
    RunClosed,
    RunFailed,
    Supervised,
    TestBatchEnd,
    TrainEnd,
    Trainer,
    TrainingError,
    TrainStart,
    ValidationEnd,
    on,
)
from heliograph.tests import kit
from heliograph.tests.kit import Batch, EventRecorder, class_batches, go_through, linear_classifier, make_run
from heliograph.tests.messages import assert_each, assert_facts
from torch import Tensor, nn


class Fail(Plugin):
    """Fails at one event."""

    asks = ("validation",)

    def __init__(self, event: str, error: BaseException | None = None) -> None:
        self._event = event
        self.error = error or ZeroDivisionError("on purpose")

    def _receive(self, event: Any) -> None:
        if event.name == self._event:
            raise self.error

    @on(EpochEnd, lane=Lane.TRANSFORM)
    def validate(self, run: Run, event: EpochEnd) -> None:
        run.control.request_validation("due")

    @on(TrainStart, BatchEnd, TestBatchEnd)
    def one(self, run: Run, event: TrainStart | BatchEnd | TestBatchEnd) -> None:
        self._receive(event)

    @on(ValidationEnd, TrainEnd)
    def two(self, run: Run, event: ValidationEnd | TrainEnd) -> None:
        self._receive(event)

    @on(RunFailed, RunClosed)
    def three(self, run: Run, event: RunFailed | RunClosed) -> None:
        self._receive(event)


fit = partial(kit.fit, validation=class_batches(1))


@pytest.mark.parametrize("event", ["train_start", "batch_end", "validation_end", "train_end"])
def test_the_original_exception_leaves_unchanged_and_the_run_is_closed_once(event: str) -> None:
    plugin = Fail(event)
    trainer = Trainer([plugin], device="cpu")
    recorder = EventRecorder(trainer.bus)
    with pytest.raises(ZeroDivisionError) as caught:
        fit(trainer)
    assert caught.value is plugin.error
    assert caught.value.args == ("on purpose",)
    assert recorder.trace[-2:] == ["run_failed", "run_closed"]
    failed, closed = recorder.events[-2:]
    assert isinstance(failed, RunFailed)
    assert isinstance(closed, RunClosed)
    assert (failed.plugin, failed.event) == ("fail", event)
    assert failed.phase == ("validation" if event == "validation_end" else "train")
    assert closed.status == "failed"
    assert "train_end" not in recorder.trace[:-2] or event == "train_end"
    assert f"in fail on {event}" in caught.value.__notes__[0]


@pytest.mark.parametrize("lane", list(Lane))
def test_a_failure_in_a_lane_spares_the_earlier_lanes_and_silences_the_later(lane: Lane) -> None:
    received: list[Lane] = []
    trainer = Trainer(device="cpu")

    def listen(each: Lane) -> None:
        def handler(run: Run, event: BatchEnd) -> None:
            received.append(each)
            if each is lane:
                raise ZeroDivisionError(each.name)

        trainer.bus.on(BatchEnd, handler, lane=each)

    for each in reversed(Lane):
        listen(each)
    trainer.plugins.register(Fail("nothing"))
    with pytest.raises(ZeroDivisionError, match=lane.name):
        fit(trainer)
    assert received == [each for each in Lane if each <= lane]


def test_secondary_errors_are_notes_on_the_first_and_every_closing_handler_runs() -> None:
    closed: list[str] = []

    class Closing(Plugin):
        @on(RunClosed)
        def note(self, run: Run, event: RunClosed) -> None:
            closed.append(event.status)

    plugins = [
        Fail("batch_end"),
        Fail("run_failed", ValueError("second")).named("second"),
        Fail("run_closed", OSError("third")).named("third"),
        Closing(),
    ]
    with pytest.raises(ZeroDivisionError) as caught:
        fit(Trainer(plugins, device="cpu"))
    assert closed == ["failed"]
    assert_each(
        caught.value.__notes__,
        ("in train", "epoch 0", "batch 1", "step 1", "in fail on batch_end"),
        ("second", "run_failed", "ValueError: second"),
        ("third", "run_closed", "OSError: third"),
    )


def test_an_error_of_closing_alone_fails_the_run() -> None:
    closed: list[str] = []

    class Closing(Plugin):
        @on(RunClosed, lane=Lane.REPORT)
        def note(self, run: Run, event: RunClosed) -> None:
            closed.append(event.status)

    with pytest.raises(OSError, match="at last") as caught:
        fit(Trainer([Fail("run_closed", OSError("at last")), Closing()], device="cpu"))
    assert closed == ["completed"]
    assert "in fail on run_closed" in caught.value.__notes__[0]


def test_a_close_method_that_fails_is_not_swallowed_and_spares_the_others() -> None:
    closed: list[str] = []

    class Bad(Fail):
        def close(self) -> None:
            raise OSError("cannot close")

    class Good(Fail):
        def close(self) -> None:
            closed.append("good")

    with pytest.raises(OSError, match="cannot close"):
        fit(Trainer([Bad("nothing"), Good("nothing")], device="cpu"))
    assert closed == ["good"]


def test_keyboard_interrupt_closes_the_run_and_leaves() -> None:
    trainer = Trainer([Fail("batch_end", KeyboardInterrupt())], device="cpu")
    recorder = EventRecorder(trainer.bus)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    failed, closed = recorder.events[-2:]
    assert isinstance(failed, RunFailed)
    assert isinstance(failed.error, KeyboardInterrupt)
    assert isinstance(closed, RunClosed)
    assert closed.status == "interrupted"


def test_keyboard_interrupt_can_be_a_result() -> None:
    result = fit(Trainer([Fail("batch_end", KeyboardInterrupt())], device="cpu"), on_interrupt="return")
    assert (result.status, result.progress.batch) == ("interrupted", 1)


def test_only_the_two_ways_of_interrupting_are_known() -> None:
    with pytest.raises(ValueError, match="'raise' or 'return'"):
        fit(Trainer([Fail("nothing")], device="cpu"), on_interrupt="ignore")


def test_system_exit_leaves_unchanged() -> None:
    with pytest.raises(SystemExit) as caught:
        fit(Trainer([Fail("batch_end", SystemExit(7)), ExceptionPassThrough()], device="cpu"))
    assert caught.value.code == 7


def test_a_loader_that_fails_midway() -> None:
    def broken() -> Iterator[Batch]:
        yield from class_batches(2)
        raise OSError("the disk is gone")

    class Loader:
        def __iter__(self) -> Iterator[Batch]:
            return broken()

    trainer = Trainer([Fail("nothing")], device="cpu")
    recorder = EventRecorder(trainer.bus)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        fit(trainer, train=Loader())
    failed = recorder.events[-2]
    assert isinstance(failed, RunFailed)
    assert (failed.plugin, failed.event, failed.phase) == (None, None, "train")
    assert_each(caught.value.__notes__, ("in train", "epoch 0", "batch 1", "step 1"))


def test_a_failing_step_is_nobodys_handler() -> None:
    class Broken(Supervised):
        def training_step(self, run: Run, batch: Any) -> Tensor:
            raise ZeroDivisionError("in the step")

    trainer = Trainer(device="cpu")
    recorder = EventRecorder(trainer.bus)
    with pytest.raises(ZeroDivisionError, match="in the step"):
        kit.fit(trainer, task=Broken(nn.Linear(4, 2), nn.functional.cross_entropy))
    failed = recorder.events[-2]
    assert isinstance(failed, RunFailed)
    assert (failed.plugin, failed.event) == (None, None)


def test_the_trainer_is_fit_for_another_run_after_a_failure() -> None:
    plugin = Fail("batch_end")
    trainer = Trainer([plugin], device="cpu")
    with pytest.raises(ZeroDivisionError):
        fit(trainer)
    plugin._event = "nothing"
    assert fit(trainer).status == "completed"


def test_an_observer_is_forgiven_switched_off_and_listed() -> None:
    class Weather(Plugin):
        policy = "observer"
        max_errors = 2

        @on(BatchEnd)
        def look(self, run: Run, event: BatchEnd) -> None:
            raise ValueError("rain")

    trainer = Trainer([Weather()], device="cpu")
    result = kit.fit(trainer, train=class_batches(5))
    assert result.status == "completed"
    assert list(result.plugin_errors) == ["weather"]
    assert_each(
        result.plugin_errors["weather"], *[("batch_end", f"step {step}", "ValueError: rain") for step in (1, 2)]
    )
    assert not trainer.plugins.is_enabled("weather")
    again = kit.fit(trainer, train=class_batches(5))
    assert again.plugin_errors == result.plugin_errors
    assert again.warnings == result.warnings
    (warning,) = result.warnings
    assert_facts(warning, "'weather'", "switched off", "2 errors")


def test_an_observer_that_cannot_close_is_forgiven_too() -> None:
    class Leaky(Plugin):
        policy = "observer"

        @on(BatchEnd)
        def look(self, run: Run, event: BatchEnd) -> None: ...

        def close(self) -> None:
            raise OSError("the disk is full")

    result = kit.fit(Leaky(), train=class_batches(1))
    assert result.status == "completed"
    assert list(result.plugin_errors) == ["leaky"]
    assert_each(result.plugin_errors["leaky"], ("close", "OSError: the disk"))


def test_an_observer_that_cannot_close_when_it_is_switched_off_during_a_run_is_forgiven() -> None:
    class Leaky(Plugin):
        policy = "observer"
        max_errors = 1

        @on(BatchEnd)
        def look(self, run: Run, event: BatchEnd) -> None:
            raise ValueError("rain")

        def close(self) -> None:
            raise OSError("the disk is full")

    result = kit.fit(Leaky(), train=class_batches(3))
    assert (result.status, result.progress.steps) == ("completed", 3)
    assert_each(
        result.plugin_errors["leaky"][:2],
        ("batch_end", "step 1", "ValueError: rain"),
        ("close", "OSError: the disk"),
    )


def test_a_function_that_is_called_like_an_observer_is_not_forgiven() -> None:
    class Weather(Plugin):
        policy = "observer"

        @on(BatchEnd)
        def look(self, run: Run, event: BatchEnd) -> None: ...

    def weather(run: Run, event: BatchEnd) -> None:
        raise ValueError("mine")

    weather.__qualname__ = "weather"
    trainer = Trainer([Weather()], device="cpu")
    trainer.bus.on(BatchEnd, weather)
    with pytest.raises(ValueError, match="mine"):
        kit.fit(trainer, train=class_batches(1))


def test_a_run_that_cannot_begin_leaves_the_trainer_free() -> None:
    class NoZero(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            raise RuntimeError("broken optimizer")

    trainer, task = Trainer(device="cpu"), linear_classifier()
    with pytest.raises(RuntimeError, match="broken optimizer"):
        trainer.fit(task, class_batches(1), optimizer=NoZero(task.model.parameters(), 0.1), epochs=1)
    assert trainer.test(task, class_batches(1)).status == "completed"


def test_a_runtime_error_of_the_users_own_stays_his() -> None:
    error = RuntimeError("no more data")
    error.__cause__ = StopIteration()
    with pytest.raises(RuntimeError, match="no more data"):
        fit(Trainer([Fail("batch_end", error)], device="cpu"))


def test_errors_on_the_list_pass_and_others_are_wrapped() -> None:
    listed = Trainer([Fail("batch_end"), ExceptionPassThrough(train=[ArithmeticError])], device="cpu")
    with pytest.raises(ZeroDivisionError):
        fit(listed)
    unlisted = Trainer([Fail("batch_end"), ExceptionPassThrough(test=[ArithmeticError])], device="cpu")
    with pytest.raises(TrainingError, match="epoch 0, step 1,") as caught:
        fit(unlisted)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_test_list_is_for_tests() -> None:
    trainer = Trainer([Fail("test_batch_end"), ExceptionPassThrough(test=[ArithmeticError])], device="cpu")
    with pytest.raises(ZeroDivisionError):
        trainer.test(linear_classifier(), class_batches(2))
    trainer = Trainer([Fail("test_batch_end"), ExceptionPassThrough(train=[ArithmeticError])], device="cpu")
    with pytest.raises(TrainingError):
        trainer.test(linear_classifier(), class_batches(2))


def test_no_error_keeps_a_batch_alive_through_the_bus() -> None:
    trainer = Trainer([Fail("batch_end")], device="cpu")
    with pytest.raises(ZeroDivisionError):
        fit(trainer)
    assert trainer.bus.blamed is None


# Ctrl-C upon Ctrl-C.


class Slow(Plugin):
    """Notes where it is called at the end, and is interrupted there."""

    def __init__(self, *interrupts: str) -> None:
        self._interrupts = interrupts
        self.received: list[str] = []

    def _receive(self, place: str) -> None:
        self.received.append(place)
        if place in self._interrupts:
            raise KeyboardInterrupt(place)

    @on(RunFailed, RunClosed)
    def receive(self, run: Run, event: RunFailed | RunClosed) -> None:
        self._receive(event.name)

    def close(self) -> None:
        self._receive("close")


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
@pytest.mark.parametrize("place", ["run_failed", "run_closed", "close"])
def test_a_second_ctrl_c_while_an_interrupted_run_closes_leaves_at_once(place: str, on_interrupt: Any) -> None:
    first, second = Slow(place), Slow()
    fail = Fail("batch_end", KeyboardInterrupt("first"))
    trainer = Trainer([fail, first.named("a"), second.named("b")], device="cpu")
    with pytest.raises(KeyboardInterrupt, match=place):
        fit(trainer, on_interrupt=on_interrupt)
    order = ["run_failed", "run_closed", "close"]
    assert first.received == order[: order.index(place) + 1]
    assert second.received == order[: order.index(place)]


def test_after_a_second_ctrl_c_the_trainer_is_free() -> None:
    trainer = Trainer([Fail("batch_end", KeyboardInterrupt()), Slow("run_failed")], device="cpu")
    with pytest.raises(KeyboardInterrupt, match="run_failed"):
        fit(trainer)
    assert trainer.test(linear_classifier(), class_batches(1)).status == "completed"


@pytest.mark.parametrize("place", ["run_closed", "close"])
def test_a_first_ctrl_c_while_a_completed_run_closes_closes_the_rest_then_raises(place: str) -> None:
    first, second = Slow(place), Slow()
    trainer = Trainer([Fail("nothing"), first.named("a"), second.named("b")], device="cpu")
    with pytest.raises(KeyboardInterrupt, match=place) as caught:
        fit(trainer)
    assert first.received == second.received == ["run_closed", "close"]
    assert_each(caught.value.__notes__, ("in train", "epoch 1", "batch 0", "step 2", f"in a on {place}"))


def test_a_first_ctrl_c_in_the_closing_is_what_leaves_and_can_be_a_result() -> None:
    plugins = [Fail("run_closed", OSError("disk")), Slow("close")]
    with pytest.raises(KeyboardInterrupt, match="close") as caught:
        fit(Trainer(plugins, device="cpu"))
    assert_each(caught.value.__notes__[1:], ("fail", "run_closed", "OSError: disk"))
    result = fit(Trainer([Fail("nothing"), Slow("close")], device="cpu"), on_interrupt="return")
    assert (result.status, result.exit_status) == ("interrupted", 130)


def test_a_second_one_in_the_closing_of_a_completed_run_leaves_at_once() -> None:
    first, second = Slow("run_closed", "close"), Slow()
    with pytest.raises(KeyboardInterrupt, match="close"):
        fit(Trainer([Fail("nothing"), first.named("a"), second.named("b")], device="cpu"))
    assert second.received == ["run_closed"]


def test_a_ctrl_c_in_the_closing_of_a_failed_run_is_a_note() -> None:
    first, second = Slow("run_closed"), Slow()
    with pytest.raises(ZeroDivisionError) as caught:
        fit(Trainer([Fail("batch_end"), first.named("a"), second.named("b")], device="cpu"))
    assert second.received == ["run_failed", "run_closed", "close"]
    assert any("run_closed: KeyboardInterrupt: run_closed" in line for line in caught.value.__notes__)


# Exit statuses.


class Exit(Plugin):
    """Asks for an exit status."""

    def __init__(self, status: Any) -> None:
        self.status = status

    @on(TrainStart, TestBatchEnd)
    def ask(self, run: Run, event: TrainStart | TestBatchEnd) -> None:
        run.hooks.exit_with(self.status)


def test_the_exit_status_of_each_ending() -> None:
    def result_of(*plugins: Any, **options: Any) -> int:
        status: int = fit(Trainer([Fail("nothing"), *plugins], device="cpu"), **options).exit_status
        return status

    assert result_of() == 0
    assert result_of(Exit(75), on_interrupt="return") == 75
    interrupt = Fail("batch_end", KeyboardInterrupt()).named("interrupt")
    assert result_of(Exit(75), interrupt, on_interrupt="return") == 130
    run = make_run(Trainer([Exit(75), Fail("batch_end")], device="cpu"))
    with pytest.raises(ZeroDivisionError):
        go_through(run)
    assert run.result.exit_status == 1


@pytest.mark.parametrize("status", [0, 143])
def test_an_exit_status_leaves_as_system_exit_when_all_is_closed(status: int) -> None:
    slow = Slow()
    trainer = Trainer([Fail("nothing"), Exit(status), slow], device="cpu")
    with pytest.raises(SystemExit) as caught:
        fit(trainer)
    assert caught.value.code == status
    assert slow.received == ["run_closed", "close"]
    with pytest.raises(SystemExit) as caught:
        trainer.test(linear_classifier(), class_batches(2))
    assert caught.value.code == status


def test_a_failure_goes_before_an_exit_status() -> None:
    with pytest.raises(ZeroDivisionError):
        fit(Trainer([Exit(3), Fail("batch_end")], device="cpu"))


def test_a_loop_of_ones_own_finds_the_exit_status_in_the_result() -> None:
    run = go_through(make_run(Trainer([Exit(3)], device="cpu")))
    assert (run.result.status, run.result.exit_status) == ("completed", 3)


@pytest.mark.parametrize("status", [-1, 256, "75", None])
def test_an_exit_status_is_a_small_number(status: Any) -> None:
    with pytest.raises(ValueError, match=r"at least 0.*255"):
        fit(Trainer([Fail("nothing"), Exit(status)], device="cpu"))


# Errors that are raised when all is closed.


class Part(Plugin):
    """Leaves an error for the end."""

    def __init__(self) -> None:
        self.error = LookupError("the run is over, and that is not a failure of it")

    @on(TrainStart, TestBatchEnd)
    def leave(self, run: Run, event: TrainStart | TestBatchEnd) -> None:
        run.hooks.raise_when_closed(self.error)


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
def test_an_error_for_the_end_is_raised_when_all_is_closed(on_interrupt: str) -> None:
    part, slow = Part(), Slow()
    trainer = Trainer([Fail("nothing"), part, slow], device="cpu")
    with pytest.raises(LookupError) as caught:
        fit(trainer, on_interrupt=on_interrupt)
    assert caught.value is part.error
    assert (caught.value.__cause__, slow.received) == (None, ["run_closed", "close"])
    with pytest.raises(LookupError):
        trainer.test(linear_classifier(), class_batches(2))


def test_a_failure_an_interrupt_and_an_exit_status_go_before_it() -> None:
    with pytest.raises(ZeroDivisionError):
        fit(Trainer([Part(), Fail("batch_end")], device="cpu"))
    with pytest.raises(SystemExit):
        fit(Trainer([Part(), Exit(3), Fail("nothing")], device="cpu"))
    interrupted = Trainer([Part(), Fail("batch_end", KeyboardInterrupt())], device="cpu")
    assert fit(interrupted, on_interrupt="return").status == "interrupted"


def test_an_error_that_is_replaced_by_itself_has_no_cause() -> None:
    class Keep(Plugin):
        @on(RunFailed)
        def keep(self, run: Run, event: RunFailed) -> None:
            run.hooks.replace_error(event.error)

    with pytest.raises(ZeroDivisionError) as caught:
        fit(Trainer([Fail("batch_end"), Keep()], device="cpu"))
    assert caught.value.__cause__ is None
