"""ExceptionPassThrough: what leaves as it is, and what leaves as TrainingError."""

from __future__ import annotations

from typing import Any

import pytest
from heliograph import (
    BatchEnd,
    Event,
    Every,
    ExceptionPassThrough,
    Plugin,
    Run,
    RunClosed,
    RunFailed,
    TestBatchEnd,
    Trainer,
    TrainingError,
    ValidationBatchEnd,
    ValidationSchedule,
    on,
)
from heliograph.tests.kit import class_batches, fit, linear_classifier


class MineError(LookupError):
    """On the lists by its base class."""


class Failing(Plugin):
    """Raises while training, validating or testing."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @on(BatchEnd)
    def train(self, run: Run, event: BatchEnd) -> None:
        self.fail(run)

    @on(ValidationBatchEnd, TestBatchEnd)
    def evaluate(self, run: Run, event: ValidationBatchEnd | TestBatchEnd) -> None:
        self.fail(run)

    def fail(self, run: Run) -> None:
        raise self.error


class FailingInValidation(Failing):
    """Trains well."""

    def fail(self, run: Run) -> None:
        if run.phase == "validation":
            raise self.error


@pytest.mark.parametrize("error", [LookupError("x"), MineError("x"), KeyError("x")])
def test_listed_types_and_subclasses_pass_unchanged(error: Exception) -> None:
    trainer = Trainer([ExceptionPassThrough(train=[LookupError]), Failing(error)], device="cpu")
    with pytest.raises(LookupError) as info:
        fit(trainer)

    assert info.value is error


def test_any_other_leaves_as_training_error() -> None:
    error = ArithmeticError("too large")
    trainer = Trainer([ExceptionPassThrough(train=[LookupError], test=[ArithmeticError]), Failing(error)], device="cpu")
    with pytest.raises(TrainingError, match=r"epoch 0, step 1.*ArithmeticError:") as info:
        fit(trainer)

    assert isinstance(info.value, RuntimeError)
    assert info.value.__cause__ is error
    assert "plugin 'failing' on batch_end" in str(info.value)


def test_an_error_of_the_task_names_no_plugin() -> None:
    mine: Any = linear_classifier()
    mine.loss_fn = lambda outputs, targets: 1 / 0
    with pytest.raises(TrainingError, match="0, step 0: ZeroDivisionError:"):
        fit(ExceptionPassThrough(), task=mine)


def test_the_lists_are_of_their_phase() -> None:
    error = ArithmeticError()
    plugins = [ExceptionPassThrough(train=[LookupError], test=[ArithmeticError]), Failing(error)]
    trainer = Trainer(plugins, device="cpu")

    with pytest.raises(ArithmeticError) as info:
        trainer.test(linear_classifier(), class_batches(1))
    assert info.value is error
    with pytest.raises(TrainingError, match="validation failed"):
        trainer.validate(linear_classifier(), class_batches(1))
    with pytest.raises(TrainingError, match="train failed"):
        fit(trainer)

    other = Trainer([ExceptionPassThrough(train=[ArithmeticError]), Failing(error)], device="cpu")
    with pytest.raises(TrainingError, match="test failed"):
        other.test(linear_classifier(), class_batches(1))


def test_a_validation_within_training_goes_by_the_train_list() -> None:
    for listed, expected in (([LookupError], LookupError), ([], TrainingError)):
        plugins: list[Any] = [ExceptionPassThrough(train=listed), FailingInValidation(LookupError())]
        trainer = Trainer([*plugins, ValidationSchedule(Every(epochs=1))], device="cpu")
        with pytest.raises(expected):
            fit(trainer, validation=class_batches(1))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_is_no_exception_is_never_touched(error: BaseException) -> None:
    trainer = Trainer([ExceptionPassThrough(), Failing(error)], device="cpu")
    with pytest.raises(type(error)) as info:
        fit(trainer)

    assert info.value is error


def test_an_interrupt_can_still_be_returned() -> None:
    trainer = Trainer([ExceptionPassThrough(), Failing(KeyboardInterrupt())], device="cpu")

    assert fit(trainer, on_interrupt="return").status == "interrupted"


def test_without_the_plugin_everything_leaves_unchanged() -> None:
    error = ArithmeticError()
    with pytest.raises(ArithmeticError) as info:
        fit(Failing(error))

    assert info.value is error


def test_handlers_see_the_original_and_every_ending() -> None:
    error = ArithmeticError()
    trainer = Trainer([ExceptionPassThrough(), Failing(error)], device="cpu")
    seen: list[Any] = []
    trainer.bus.on(RunFailed, lambda run, event: seen.append(event.error))
    trainer.bus.on(RunClosed, lambda run, event: seen.append(event.status))
    with pytest.raises(TrainingError):
        fit(trainer)

    assert seen == [error, "failed"]
    assert any("in failing on batch_end" in note for note in error.__notes__)


def test_one_trainer_after_a_failure() -> None:
    failing = Failing(ArithmeticError())
    trainer = Trainer([ExceptionPassThrough(), failing], device="cpu")
    with pytest.raises(TrainingError):
        fit(trainer)
    trainer.plugins.disable(failing)

    assert fit(trainer).status == "completed"
    assert trainer.test(linear_classifier(), class_batches(1)).status == "completed"
    assert Event.name == "event"


@pytest.mark.parametrize("options", [{"train": ["KeyError"]}, {"test": [KeyError()]}, {"train": [int]}])
def test_only_exception_types_are_taken(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="takes exception types, got"):
        ExceptionPassThrough(**options)


def test_two_of_them_are_refused() -> None:
    with pytest.raises(ValueError, match="both claim errors"):
        Trainer([ExceptionPassThrough(), ExceptionPassThrough().named("other")], device="cpu")
