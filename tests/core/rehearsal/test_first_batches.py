"""Train on the first batches over and over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    EarlyStopping,
    Every,
    GradientAccumulation,
    Lane,
    LogSchedule,
    Phases,
    Plugin,
    RNGCapture,
    Run,
    Streams,
    Task,
    Trainer,
    ValidationSchedule,
    on,
    tuning,
)
from heliograph.core.rehearsal.probes import Overfitting
from heliograph.tests.core.rehearsal.pair import Pair
from heliograph.tests.kit import adam, class_batches, linear_classifier, random_batches, sgd
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SINK: list[Any] = []


@pytest.fixture(autouse=True)
def _empty() -> None:
    SINK.clear()


class Seen(Plugin):
    """Notes the batches."""

    @on(BatchEnd)
    def note(self, run: Run, event: BatchEnd) -> None:
        SINK.append(run.batch[0].sum().item())


def overfit(*plugins: Any, train: Any = None, task: Any = None, **options: Any) -> Overfitting:
    task = linear_classifier() if task is None else task
    train = class_batches(5) if train is None else train
    return tuning.overfit(Trainer(plugins, device="cpu"), task, train, **{"optimizer": sgd(0.5), "steps": 6, **options})


def test_the_losses_are_those_of_a_training_on_the_first_batch() -> None:
    found = overfit(Seen())
    task, (inputs, classes) = linear_classifier(), class_batches(1)[0]
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)
    expected = []
    for _ in range(6):
        loss = nn.functional.cross_entropy(task.model(inputs), classes)
        expected.append(loss.item())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert found.losses == {"loss": pytest.approx(expected)}
    assert (found.first_loss, found.last_loss) == (found.losses["loss"][0], found.losses["loss"][-1])
    assert found.batches == 1
    assert [inputs.sum().item()] * 6 == SINK
    assert_facts(found, "loss", f"{expected[0]:.6g}", f"{expected[-1]:.6g}", "6 steps", "1 batch")
    assert repr(found) == f"<Overfitting: {str(found).splitlines()[0]}>"


def test_several_batches_in_turn_and_the_validation_on_the_same() -> None:
    found = overfit(Seen(), ValidationSchedule(Every(epochs=1)), batches=2, steps=5)
    first = [inputs.sum().item() for inputs, _ in class_batches(2)]
    assert [*first, *first, first[0]] == SINK
    assert found.metrics["validation/loss"] < found.first_loss
    assert found.batches == 2
    assert overfit(validate=False).metrics == {}


def test_the_first_batches_are_those_of_the_shuffled_run_and_read_once() -> None:
    class Counted(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            SINK.append("read")
            return super().__getitem__(index)  # type: ignore[no-untyped-call]

    data = Counted(*(torch.cat(each) for each in zip(*class_batches(6), strict=True)))
    options: dict[str, Any] = {"train": data, "loader_params": {"batch_size": 3, "shuffle": True}}
    overfit(RNGCapture(5, probe=False), Seen(), steps=12, **options)
    assert SINK.count("read") == 3
    kept = {each for each in SINK if each != "read"}
    SINK.clear()
    Trainer([RNGCapture(5), Seen()], device="cpu").fit(linear_classifier(), optimizer=sgd(), steps=1, **options)
    assert kept == {each for each in SINK if each != "read"}


def test_accumulation_shapes_it_and_what_stops_or_logs_takes_no_part() -> None:
    logs = LogSchedule(Every(steps=1))
    found = overfit(GradientAccumulation(2), logs, EarlyStopping("train/loss", patience=1), steps=7, optimizer=sgd(0.0))
    assert len(found.losses["loss"]) == 7
    assert len(set(found.losses["loss"])) == 1


def test_a_transform_that_changes_the_batch_in_place_begins_with_the_same_one() -> None:
    class Doubles(Plugin):
        @on(BatchStart, lane=Lane.TRANSFORM)
        def double(self, run: Run, event: BatchStart) -> None:
            run.batch[0].mul_(2)

    overfit(Doubles(), Seen())
    assert len(set(SINK)) == 1


@pytest.mark.parametrize("kind", ["unsized", "phases", "workers"])
def test_kinds_of_data(kind: str) -> None:
    class Unsized:
        def __iter__(self) -> Iterator[Any]:
            return iter(class_batches(2))

    data = TensorDataset(*(torch.cat(each) for each in zip(*class_batches(4), strict=True)))
    train = {
        "unsized": Unsized(),
        "phases": Phases(class_batches(3), class_batches(3)),
        "workers": DataLoader(data, batch_size=3, num_workers=1),
    }[kind]
    found = overfit(Seen(), train=train)
    assert [class_batches(1)[0][0].sum().item()] * 6 == SINK
    assert found.last_loss < found.first_loss


def test_several_optimizers_have_losses_by_name() -> None:
    rates = {"one": adam(0.1), "two": adam(0.1)}
    found = overfit(task=Pair(), train=random_batches(2), optimizer=rates, validate=False)
    assert set(found.losses) == {"one_loss", "two_loss"}
    assert all(values[-1] < values[0] for values in found.losses.values())
    assert found.metrics == {}


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="batches= must be"):
        overfit(batches=0)
    with pytest.raises(TypeError, match="validate= is True"):
        overfit(validate="x")
    with pytest.raises(ValueError, match="read only once"):
        overfit(train=(each for each in class_batches(2)))


def test_what_has_no_meaning_here_is_refused() -> None:
    for options in ({"epochs": 3}, {"validation": class_batches(1)}, {"limit_validation": 1}):
        (name,) = options
        with pytest.raises(TypeError, match=rf"batches, .*: leave {name}="):
            overfit(**options)


@pytest.mark.parametrize("streams", [dict, Streams, Phases])
def test_batches_of_several_streams_are_not_validated(streams: Callable[[dict[str, Any]], Any]) -> None:
    class Both(Task):
        def __init__(self) -> None:
            self.model = nn.Linear(4, 2)

        def training_step(self, run: Run, batch: Any) -> Tensor:
            inputs, targets = batch["one"]
            return nn.functional.cross_entropy(self.model(inputs), targets)

        def validation_step(self, run: Run, batch: Any) -> Any:
            raise AssertionError

    data = streams({"one": class_batches(2), "other": class_batches(2)})
    found = tuning.overfit(Trainer(device="cpu"), Both(), data, optimizer=sgd(), steps=3)
    assert len(found.losses["loss"]) == 3
    assert found.metrics == {}
