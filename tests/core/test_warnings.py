"""What was asked for and did not happen: the warnings of a result, and strict trainers."""

from __future__ import annotations

import pytest
from heliograph import EpochStart, Plugin, Run, RunClosed, StrictError, Trainer, TrainStart, on
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph.tests.messages import assert_facts

BATCHES = class_batches(3)


class WarnsAtTheStart(Plugin):
    """Knows at once that something will not happen."""

    def __init__(self) -> None:
        self.epochs = 0

    @on(TrainStart)
    def warn(self, run: Run, event: TrainStart) -> None:
        """Say it, twice."""
        run.warn("The folder is full.")
        run.warn("The folder is full.")

    @on(EpochStart)
    def count(self, run: Run, event: EpochStart) -> None:
        """Count what is trained all the same."""
        self.epochs += 1


class WarnsAtTheEnd(Plugin):
    """Knows only at the end."""

    @on(RunClosed)
    def warn(self, run: Run, event: RunClosed) -> None:
        """Say it."""
        run.warn("Three lines were lost.")


def test_a_result_has_no_warnings_when_all_is_well() -> None:
    result = Trainer(device="cpu").fit(linear_classifier(), BATCHES, optimizer=sgd(), epochs=1)
    assert result.warnings == ()
    assert "WARNING" not in str(result)


def test_warnings_of_plugins_are_in_the_result_once_each() -> None:
    result = Trainer([WarnsAtTheStart(), WarnsAtTheEnd()], device="cpu").fit(
        linear_classifier(), BATCHES, optimizer=sgd(), epochs=1
    )
    assert result.warnings == ("The folder is full.", "Three lines were lost.")
    assert_facts(result, "WARNING: ", "The folder is full.", "WARNING: ", "Three lines were lost.")


def test_a_strict_trainer_raises_before_the_first_epoch_where_it_is_known_then() -> None:
    plugin = WarnsAtTheStart()
    with pytest.raises(StrictError, match=r"The folder is full\.") as caught:
        Trainer([plugin], device="cpu", strict=True).fit(linear_classifier(), BATCHES, optimizer=sgd(), epochs=1)
    assert plugin.epochs == 0
    assert caught.value.result is None


def test_a_strict_trainer_raises_at_the_end_with_the_result() -> None:
    with pytest.raises(StrictError, match="Three lines") as caught:
        Trainer([WarnsAtTheEnd()], device="cpu", strict=True).fit(
            linear_classifier(), BATCHES, optimizer=sgd(), epochs=1
        )
    assert caught.value.result is not None
    assert (caught.value.result.status, caught.value.result.progress.steps) == ("completed", 3)
    assert caught.value.warnings == ("Three lines were lost.",)


def test_a_strict_trainer_raises_after_a_validation_of_its_own() -> None:
    with pytest.raises(StrictError, match="Three lines"):
        Trainer([WarnsAtTheEnd()], device="cpu", strict=True).validate(linear_classifier(), BATCHES)


def test_a_warning_is_text() -> None:
    class Wrong(Plugin):
        @on(TrainStart)
        def warn(self, run: Run, event: TrainStart) -> None:
            run.warn(5)  # type: ignore[arg-type]  # that is what is tested

    with pytest.raises(TypeError, match=r"run\.warn takes a line"):
        Trainer([Wrong()], device="cpu").fit(linear_classifier(), BATCHES, optimizer=sgd(), epochs=1)
