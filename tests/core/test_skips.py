"""Steps that never happen: too many skips in a row are an error that names who skipped; none at all is a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from heliograph import (
    BatchStart,
    EpochEnd,
    EpochStart,
    Event,
    GradientsReady,
    NaNGuard,
    Plugin,
    Run,
    StrictError,
    Supervised,
    Task,
    Trainer,
    TrainStart,
    on,
)
from heliograph.tests.kit import fit, go_through, linear_classifier, make_run, sgd
from heliograph.tests.messages import assert_each, assert_facts
from torch import Tensor, nn


class Skip(Plugin):
    """Skips every batch, every step or every epoch, where it is to."""

    asks = ("skip_batch", "skip_step")

    def __init__(self, event: type[Event], *, when: Callable[[Run], bool] = lambda run: True) -> None:
        self._event, self._when = event, when

    @on(EpochStart, BatchStart, GradientsReady)
    def skip(self, run: Run, event: Event) -> None:
        if isinstance(event, self._event) and self._when(run):
            verbs: dict[type[Event], Any] = {
                EpochStart: run.control.end_epoch,
                BatchStart: run.control.skip_batch,
                GradientsReady: run.control.skip_step,
            }
            verbs[self._event]("it is never good")


class Named(Task):
    """Two optimizers."""

    def __init__(self) -> None:
        self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 2)

    def training_step(self, run: Run, batch: tuple[Tensor, Tensor]) -> Any:
        for name in ("one", "two"):
            yield name, nn.functional.cross_entropy(getattr(self, name)(batch[0]), batch[1])


def broken(weight: float = float("nan")) -> Supervised:
    task = linear_classifier()
    nn.init.constant_(task.model.get_parameter("weight"), weight)
    return task


@pytest.mark.parametrize("event", [EpochStart, BatchStart, GradientsReady])
@pytest.mark.parametrize("length", [{"steps": 10}, {"epochs": 10_000}])
def test_a_plugin_that_skips_everything_does_not_train_for_ever(event: type[Event], length: dict[str, int]) -> None:
    with pytest.raises(RuntimeError) as caught:
        fit(Skip(event), **length)
    text = str(caught.value)
    assert_facts(text, "101 batches or steps", "skipped", "step 0")
    assert "skip, 101 times (it" in text
    assert "max_skipped_steps=" in text


@pytest.mark.parametrize("length", [{"steps": 10}, {"epochs": 10_000}])
def test_fp16_that_skips_every_step_is_an_error(length: dict[str, int]) -> None:
    trainer = Trainer(device="cpu", precision="fp16")
    with pytest.raises(RuntimeError, match="skipped: the engine, 101"):
        fit(trainer, task=broken(), **length)


def test_who_skipped_names_everybody() -> None:
    trainer = Trainer([Skip(GradientsReady, when=lambda run: run.progress.batches < 3)], device="cpu", precision="fp16")
    with pytest.raises(RuntimeError, match=r"engine, 98 times \(fp16"):
        fit(trainer, task=broken(), steps=10)


def test_of_several_optimizers_a_round_without_any_step_counts() -> None:
    optimizers = {"one": sgd(), "two": sgd()}
    with pytest.raises(RuntimeError, match="6 batches or steps"):
        fit(Skip(GradientsReady), task=Named(), optimizer=optimizers, steps=3, max_skipped_steps=5)
    only_one = Skip(GradientsReady, when=lambda run: run.stepping.optimizer_name == "one")
    assert fit(only_one, task=Named(), optimizer=optimizers, steps=9, max_skipped_steps=5).progress.steps == 9


def test_a_step_in_between_begins_the_count_again() -> None:
    result = fit(Skip(BatchStart, when=lambda run: run.progress.batches % 6 != 5), steps=20, max_skipped_steps=5)
    assert (result.progress.steps, result.progress.skipped_batches) == (20, 100)
    with pytest.raises(RuntimeError, match="5 batches or steps"):
        fit(Skip(BatchStart, when=lambda run: run.progress.batches % 6 != 5), steps=20, max_skipped_steps=4)


def test_any_number_may_be_skipped_where_that_is_said() -> None:
    skip = Skip(BatchStart, when=lambda run: run.progress.batches < 300)
    assert fit(skip, steps=1, max_skipped_steps=None).progress.skipped_batches == 300


@pytest.mark.parametrize("number", [0, -1, 2.5, "many"])
def test_the_limit_is_a_positive_number(number: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_skipped_steps="):
        fit(max_skipped_steps=number)


def test_a_loop_of_ones_own_has_the_same_limit() -> None:
    with pytest.raises(RuntimeError, match="skipped: skip, 3"):
        go_through(make_run(Trainer([Skip(BatchStart)], device="cpu"), batches=9, max_skipped_steps=2))


def test_a_resumed_run_counts_on() -> None:
    states: list[dict[str, Any]] = []
    first = Trainer([Skip(BatchStart)], device="cpu")
    first.bus.on(EpochEnd, lambda run, event: states.append(run.state_dict()))
    with pytest.raises(RuntimeError, match="6 batches or steps"):
        fit(first, steps=9, max_skipped_steps=5)

    second = Trainer([Skip(BatchStart)], device="cpu")
    second.bus.on(TrainStart, lambda run, event: run.resume(states[1]))
    with pytest.raises(RuntimeError, match="6 batches or steps") as caught:
        fit(second, steps=9, max_skipped_steps=5)
    assert "epoch 2, batch 1," in "".join(caught.value.__notes__)


def test_a_run_without_a_step_says_so() -> None:
    result = fit(Trainer(device="cpu", precision="fp16"), task=broken(), epochs=2)
    assert_each(result.warnings, ("no optimizer step", "4 batches", "4 steps", "the engine", "4 times", "fp16"))
    with pytest.raises(StrictError, match="no optimizer step"):
        fit(Trainer([Skip(BatchStart)], device="cpu", strict=True))


def test_infinite_gradients_of_finite_losses_in_fp16_are_the_engines_skips() -> None:
    """What `NaNGuard` cannot see."""
    trainer = Trainer([NaNGuard("skip")], device="cpu", precision="fp16")
    task = Supervised(nn.Linear(4, 2), lambda outputs, targets: (outputs.float() * 0).sum().sqrt())  # at 0
    with pytest.raises(RuntimeError, match="skipped: the engine, 101"):
        fit(trainer, task=task, steps=5)


def test_a_run_that_is_stopped_before_its_first_batch_was_not_to_make_a_step() -> None:
    trainer = Trainer(device="cpu")
    trainer.bus.on(TrainStart, lambda run, event: run.control.stop("not today"))
    assert fit(trainer).warnings == ()
