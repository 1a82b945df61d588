"""Means over samples, and accuracy."""

from __future__ import annotations

import pickle
from copy import deepcopy
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import BatchEnd, Every, LogSchedule, Run, Supervised, Trainer, ValidationSchedule, accuracy
from heliograph.core.metrics import Metrics
from heliograph.core.metrics.means import Means, Sum, own_name
from heliograph.tests import kit


def test_weighted_means_of_tensors_and_numbers() -> None:
    means = Means()
    means.add("loss", torch.tensor(1.0), 3)
    means.add("loss", torch.tensor(5.0), 1)
    means.add("count", 2)
    means.add("count", 4.0, 3.0)
    means.add("one", torch.tensor([7.0]))

    assert means.read("train") == {"train/loss": 2.0, "train/count": 3.5, "train/one": 7.0}


def test_one_name_for_both_kinds() -> None:
    means = Means()
    means.add("loss", torch.tensor(1.0))
    means.add("loss", 2.0)
    means.add("loss", torch.tensor(6.0))

    assert means.read("train") == {"train/loss": 3.0}


def test_reading_starts_again() -> None:
    means = Means()
    means.add("loss", torch.tensor(1.0))
    assert means.read("train") == {"train/loss": 1.0}
    assert means.read("train") == {}
    means.add("loss", torch.tensor(3.0))
    assert means.read("validation") == {"validation/loss": 3.0}


def test_without_weight_there_is_no_mean() -> None:
    means = Means()
    means.add("loss", 3.0, 0.0)
    means.add("other", torch.tensor(3.0), 0)

    assert means.read("train") == {}


def test_sums_of_many_terms_stay_exact_where_float32_would_drift() -> None:
    means, drifting, value = Means(), torch.zeros(()), torch.tensor(0.1)
    for _ in range(100_000):
        means.add("loss", value)
        drifting += value

    assert means.read("train")["train/loss"] == pytest.approx(0.1, rel=1e-6)
    assert drifting.item() / 100_000 != pytest.approx(0.1, rel=1e-4)


def test_a_term_that_is_far_larger_costs_no_more_than_its_own_precision() -> None:
    means = Means()
    means.add("loss", torch.tensor(1e8))
    for _ in range(1000):
        means.add("loss", torch.tensor(1.0))

    assert means.read("train")["train/loss"] == pytest.approx((1e8 + 1000) / 1001, rel=1e-6)


@pytest.mark.parametrize("value", [torch.tensor(3), torch.tensor(True), torch.tensor(3.0, dtype=torch.bfloat16)])
def test_other_types_of_numbers(value: torch.Tensor) -> None:
    means = Means()
    means.add("n", value, 2)

    assert means.read("train") == {"train/n": float(value)}


def test_gradients_are_not_kept() -> None:
    means = Means()
    means.add("loss", torch.tensor(2.0, requires_grad=True) * 3)

    assert means.read("train") == {"train/loss": 6.0}


def test_the_value_may_change_afterwards() -> None:
    means = Means()
    value = torch.tensor(2.0, dtype=torch.float64)
    means.add("loss", value)
    value.fill_(9.0)

    assert means.read("train") == {"train/loss": 2.0}


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(0), torch.ones(1, 3)])
def test_what_is_no_scalar_is_refused(value: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="Metric 'acc' must"):
        Means().add("acc", value)


@pytest.mark.parametrize("value", [None, "0.5"])
def test_what_is_not_a_number_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"scalar tensor, got {value!r}\.$"):
        Means().add("acc", value)


@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_saved_and_continued_is_bit_equal(cut: int) -> None:
    values = [0.1, 1e9, 0.3, 1e-9, 7.7]
    whole, first, second = Means(), Means(), Means()
    for index, value in enumerate(values):
        for means in (whole, first if index < cut else second):
            if index == cut and means is second:
                second.load_state_dict(first.state_dict())
            means.add("loss", torch.tensor(value, dtype=torch.float64), index + 1)
            means.add("number", value, index + 1)
    if cut == len(values):
        second.load_state_dict(first.state_dict())

    assert second.read("train") == whole.read("train")


def test_a_sum_that_began_on_the_cpu_continues_on_a_device() -> None:
    """Without a wait for the device: what was added up so far is copied there."""
    own, device = Sum(), torch.device("meta")
    own.add("loss", torch.tensor(3.0), 2)
    own.add("loss", torch.zeros((), device=device), 1)
    assert (own.host, own.weight) == (0.0, 3)
    assert own.on_device is not None
    assert own.on_device.device == device


def test_state_is_plain_and_taking_it_changes_nothing() -> None:
    means = Means()
    means.add("loss", torch.tensor(2.0), 4)
    means.add("n", 3.0)
    state = means.state_dict()

    assert state == {"loss": [8.0, 4.0], "n": [3.0, 1.0]}
    assert means.read("train") == {"train/loss": 2.0, "train/n": 3.0}


def test_accuracy() -> None:
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.6, 0.4]])

    assert accuracy(outputs, torch.tensor([1, 0, 1])).item() == pytest.approx(2 / 3)
    assert accuracy(outputs, torch.tensor([1, 0, 0])).item() == 1.0


def test_every_way_into_metrics_makes_numbers() -> None:
    metrics = Metrics({"a": True})
    metrics["b"] = torch.tensor([2])
    metrics.update({"c": np.float64(3)}, d=Fraction(1, 2))
    metrics |= {"e": torch.ones(1, 1)}
    assert metrics == {"a": 1.0, "b": 2.0, "c": 3.0, "d": 0.5, "e": 1.0}
    assert {type(value) for value in metrics.values()} == {float}
    assert deepcopy(metrics) == pickle.loads(pickle.dumps(metrics)) == metrics
    assert type(metrics | {"g": 7}) is dict


@pytest.mark.parametrize("value", ["1.5", b"1", None, [1.0], 1j, 10**400, torch.ones(2), {}], ids=repr)
def test_no_way_into_metrics_takes_what_is_no_number(value: Any) -> None:
    metrics = Metrics()
    for put in (
        lambda: Metrics({"x": value}),
        lambda: metrics.__setitem__("x", value),
        lambda: metrics.update(x=value),
        lambda: metrics.__ior__({"x": value}),
    ):
        with pytest.raises(TypeError, match=r"^The metric 'x' must"):
            put()
    assert metrics == {}


@pytest.mark.parametrize(
    ("name", "phase", "own"),
    [
        ("train/loss", "train", "loss"),
        ("train/grad/norm", "train", "grad/norm"),
        ("grad/norm", "train", "grad/norm"),
        ("validation/loss", "validation", "loss"),
        ("validation/loss", "test", "loss"),
        ("test/loss", "validation", "loss"),
        ("trainer/loss", "train", "trainer/loss"),
    ],
)
def test_a_phase_before_a_name_is_not_put_there_twice(name: str, phase: str, own: str) -> None:
    assert own_name(name, phase) == own


@pytest.mark.parametrize(("name", "phase"), [("validation/loss", "train"), ("train/x", "test"), ("train/", "train")])
def test_a_value_of_another_phase_is_refused(name: str, phase: str) -> None:
    with pytest.raises(ValueError, match=rf"{phase}, .* {phase}/<"):
        own_name(name, phase)


def test_a_name_that_is_not_a_string_is_refused() -> None:
    class Numbered(Supervised):
        def validation_step(self, run: Run, batch: Any) -> Any:
            return {3: 1.0}

    with pytest.raises(TypeError, match=r"'loss'; got 3\."):
        Trainer(device="cpu").validate(Numbered(torch.nn.Linear(4, 2), torch.nn.MSELoss()), kit.class_batches(1))


def test_tracked_and_returned_values_may_name_their_phase() -> None:
    class Names(Supervised):
        def training_step(self, run: Run, batch: Any) -> torch.Tensor:
            run.track("train/x", 3.0)
            return super().training_step(run, batch)

        def validation_step(self, run: Run, batch: Any) -> dict[str, float]:
            run.track("validation/y", 4.0)
            return {"validation/loss": 5.0}

    result = kit.fit(
        LogSchedule(Every(steps=1)),
        ValidationSchedule(Every(epochs=1)),
        task=Names(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy),
        validation=kit.class_batches(1),
    )
    assert result.metrics.keys() == {"train/x", "train/loss", "validation/y", "validation/loss"}


class Tracks(Supervised):
    """Tracks values beside those that it returns.

    Args:
        name: what is tracked.
        in_phase: when.
        first: the batch from which on.
    """

    def __init__(self, name: str, in_phase: str = "train", first: int = 0) -> None:
        super().__init__(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
        self.name, self.in_phase, self.first = name, in_phase, first

    def _track(self, run: Run) -> None:
        if run.phase == self.in_phase and max(run.progress.batch, run.progress.evaluated) >= self.first:
            run.track(self.name, 1.0)

    def training_step(self, run: Run, batch: Any) -> torch.Tensor:
        self._track(run)
        return super().training_step(run, batch)

    def validation_step(self, run: Run, batch: Any) -> Any:
        self._track(run)
        measured: Any = super().validation_step(run, batch)
        return {**measured, "error": 2.0}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", ["loss", "train/loss"])
@pytest.mark.parametrize("plugins", [[], [LogSchedule(epochs=1)]], ids=["unread", "read"])
def test_the_name_of_the_returned_loss_is_reserved(plugins: list[Any], name: str, first: int) -> None:
    with pytest.raises(ValueError, match="name 'loss' is reserved"):
        kit.fit(*plugins, task=Tracks(name, first=first))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("name", "phase", "call"),
    [
        ("loss", "validation", "validate"),
        ("validation/loss", "validation", "validate"),
        ("error", "validation", "validate"),
        ("loss", "test", "test"),
        ("validation/error", "test", "test"),
    ],
)
def test_a_name_is_tracked_or_returned_in_an_evaluation(name: str, phase: str, call: str, first: int) -> None:
    key = name.split("/")[-1]
    with pytest.raises(ValueError, match=f"name '{key}' is reserved"):
        getattr(Trainer(device="cpu"), call)(Tracks(name, phase, first), kit.class_batches(3))


def test_a_training_may_track_what_its_validation_returns_and_the_reverse() -> None:
    result = kit.fit(
        LogSchedule(epochs=1),
        ValidationSchedule(epochs=1),
        task=Tracks("error"),
        validation=kit.class_batches(1),
        epochs=2,
    )
    assert {"train/error", "validation/error"} < result.metrics.keys()


def test_a_handler_that_tracks_the_name_of_the_loss_is_refused() -> None:
    trainer = Trainer(device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: run.track("loss", 1.0))
    with pytest.raises(ValueError, match="name 'loss' is reserved"):
        kit.fit(trainer)


class Critic(Tracks):
    def training_step(self, run: Run, batch: Any) -> Any:
        self._track(run)
        yield "model", Supervised.training_step(self, run, batch)


def test_the_losses_of_several_optimizers_have_reserved_names() -> None:
    with pytest.raises(ValueError, match="name 'model_loss' is reserved"):
        kit.fit(task=Critic("train/model_loss"), optimizer={"model": kit.sgd()})
    result = kit.fit(LogSchedule(epochs=1), task=Critic("loss"), optimizer={"model": kit.sgd()})
    assert result.metrics["train/loss"] == 1.0


@pytest.mark.parametrize("is_before", [True, False])
def test_a_loop_of_its_own_does_not_track_the_loss_that_it_steps_with(is_before: bool) -> None:
    task = Tracks("loss", "none")
    with (
        pytest.raises(ValueError, match="name 'loss' is reserved"),
        Trainer(device="cpu").run(task, kit.class_batches(2), optimizer=kit.sgd(), epochs=1) as run,
    ):
        for _ in run.epochs():
            for batch in run.batches():
                if is_before:
                    run.track("loss", 1.0)
                run.step(task.training_step(run, batch))
                run.track("loss", 1.0)


def test_a_loop_that_steps_with_gradients_of_its_own_may_track_its_loss() -> None:
    task = Tracks("loss", "none")
    trainer = Trainer([LogSchedule(epochs=1)], device="cpu")
    with trainer.run(task, kit.class_batches(2), optimizer=kit.sgd(), epochs=1) as run:
        for _ in run.epochs():
            for batch in run.batches():
                task.training_step(run, batch).backward()  # type: ignore[no-untyped-call]
                run.track("loss", 1.0)
                run.step_with_gradients("optimizer")
    assert run.result.metrics["train/loss"] == 1.0
