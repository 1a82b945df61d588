"""What a validation does for each batch besides the task's step."""

from __future__ import annotations

from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from heliograph import (
    EarlyStopping,
    EpochMeans,
    Plugin,
    PredictEnd,
    Run,
    Supervised,
    Task,
    TestEnd,
    Trainer,
    ValidationEnd,
    ValidationSchedule,
    on,
)
from heliograph.tests.kit import linear_classifier
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

BATCH = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
LOSS = torch.tensor(0.5)


class Constant(Task):
    """Measures nothing: what is computed is the framework's."""

    def __init__(self, measured: Any) -> None:
        self.measured = measured

    def validation_step(self, run: Any, batch: Any) -> Any:
        return self.measured


class Own(Plugin):
    """Measures itself."""

    @on(ValidationEnd)
    def measure(self, run: Run, event: ValidationEnd) -> None:
        event.metrics["validation/own"] = 2.0


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotation here
    """Counts the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor here
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operations(task: Task, batches: int) -> Counter[str]:
    seen = Operations()
    with seen:
        Trainer(device="cpu").validate(task, [BATCH] * batches)
    return seen.counts


@pytest.mark.parametrize("measured", [LOSS, {"loss": LOSS}], ids=["tensor", "dict"])
def test_a_batch_costs_one_operation_a_value(measured: Any) -> None:
    assert operations(Constant(measured), 30) - operations(Constant(measured), 20) == {
        "aten._local_scalar_dense.default": 10
    }


@pytest.mark.parametrize("measured", [None, {}], ids=["None", "empty"])
def test_a_batch_without_values_costs_no_operation(measured: Any) -> None:
    class First(Constant):
        def validation_step(self, run: Any, batch: Any) -> Any:
            if not run.progress.evaluated:
                run.track("loss", LOSS)
            return self.measured

    assert operations(First(measured), 30) == operations(First(measured), 20)


@pytest.mark.parametrize("phase", ["validate", "test"])
def test_a_step_that_returns_none_and_measures_nothing_is_an_error(phase: str) -> None:
    step = {"validate": "validation_step", "test": "test_step"}[phase]
    with pytest.raises(TypeError, match=rf"^Constant\.{step} returned None,"):
        getattr(Trainer(device="cpu"), phase)(Constant(None), [BATCH] * 2)


@pytest.mark.parametrize("plugin", [EarlyStopping("validation/loss", patience=1), EpochMeans()], ids=["watched", "not"])
def test_a_training_whose_validation_measures_nothing_is_an_error(plugin: Plugin) -> None:
    """Before a plugin that monitors the loss says that there is none."""

    class Forgotten(Supervised):
        def validation_step(self, run: Any, batch: Any) -> Any:
            super().validation_step(run, batch)

    task = Forgotten(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
    trainer = Trainer([plugin, ValidationSchedule(epochs=1)], device="cpu")
    with pytest.raises(TypeError, match=r"^Forgotten\.validation_step returned None,"):
        trainer.fit(task, [BATCH], optimizer=torch.optim.SGD, epochs=1, validation=[BATCH])


def test_a_step_that_returns_none_may_measure_otherwise() -> None:
    class Measures(Constant):
        def validation_step(self, run: Any, batch: Any) -> None:
            getattr(run, self.measured)("value", LOSS if self.measured == "track" else batch[1])

    trainer = Trainer(device="cpu")
    assert trainer.validate(Measures("track"), [BATCH]).metrics == {"validation/value": 0.5}
    assert trainer.validate(Measures("collect"), [BATCH]).metrics == {}
    assert trainer.validate(Constant({}), [BATCH]).metrics == {}
    trainer = Trainer([Own()], device="cpu")
    assert trainer.validate(Constant(None), [BATCH]).metrics == {"validation/own": 2.0}


def test_a_set_whose_counts_are_all_0_is_a_warning() -> None:
    """A mean of nothing is not a number, and so there is none."""

    class OfSet(Task):
        def validation_step(self, run: Any, batch: Any) -> Any:
            return batch

    result = Trainer(device="cpu").validate(OfSet(), {"empty": [(0.0, 0)] * 2, "full": [(0.0, 0), (6.0, 3)]})
    assert result.metrics == {"validation/full/loss": 2.0}
    assert any("'empty' has no metric:" in line for line in result.warnings)


@pytest.mark.parametrize("make_task", [lambda: Constant(LOSS), linear_classifier], ids=["own", "ours"])
def test_no_batch_asks_an_abstract_class(monkeypatch: pytest.MonkeyPatch, make_task: Callable[[], Task]) -> None:
    """A tensor or a dict is known for what it is: an answer of `Mapping` takes as long as adding a loss."""
    asked: Counter[str] = Counter()
    ask = ABCMeta.__instancecheck__

    def counted(kind: Any, instance: Any) -> bool:
        asked[kind.__name__] += 1
        return ask(kind, instance)

    def questions(batches: int) -> Counter[str]:
        asked.clear()
        Trainer(device="cpu").validate(make_task(), [BATCH] * batches)
        return asked.copy()

    questions(1)  # what is loaded at first
    monkeypatch.setattr(ABCMeta, "__instancecheck__", counted)
    assert questions(30) == questions(20)


def test_a_loss_with_a_gradient_is_averaged_as_any_other() -> None:
    """A step may compute gradients, as for an adversarial loss."""

    class WithGradient(Task):
        def __init__(self) -> None:
            self.model = torch.nn.Linear(4, 1)

        def validation_step(self, run: Any, batch: Any) -> Tensor:
            with torch.enable_grad():
                loss: Tensor = self.model(batch[0]).sum() * 0 + 3
                return loss

    assert Trainer(device="cpu").validate(WithGradient(), [BATCH] * 3).metrics == {"validation/loss": 3.0}


@pytest.mark.parametrize("phase", ["validate", "test", "predict"])
@pytest.mark.parametrize("where", ["step", "loader", "end"])
def test_the_note_of_an_error_says_which_batch_of_which_set(phase: str, where: str) -> None:
    class Fails(Task):
        batches = 0

        def validation_step(self, run: Any, batch: Any) -> Tensor:
            self.batches += 1
            if where == "step" and self.batches == 7:
                raise ArithmeticError
            return batch[0].reshape(1)  # type: ignore[no-any-return]

        predict_step = validation_step

    class Set:
        def __iter__(self) -> Iterator[Any]:
            yield from [(LOSS,)] * 4
            if where == "loader":
                raise ArithmeticError

    class End(Plugin):
        @on(ValidationEnd, TestEnd, PredictEnd)
        def fail(self, run: Run, event: ValidationEnd | TestEnd | PredictEnd) -> None:
            raise ArithmeticError

    with pytest.raises(ArithmeticError) as raised:
        plugins = [End()] if where == "end" else []
        getattr(Trainer(plugins, device="cpu"), phase)(Fails(), {"a": [(LOSS,)] * 4, "b": Set()})
    place = {"step": ("batch 2", "set 'b'"), "loader": ("batch 4", "set 'b'"), "end": ()}[where]
    split = {"validate": "validation"}.get(phase, phase)
    assert_facts(raised.value.__notes__[0], f"in {split}", *place, "epoch 0", "batch 0", "step 0")


@pytest.mark.parametrize("how", ["fit", "own loop", "validate", "predict"])
@pytest.mark.parametrize("extra", [{}, {"step": torch.tensor(1), "shard": "s-01"}, {"class_weights": torch.ones(7)}])
def test_samples_are_counted_by_the_tensors_of_a_batch(how: str, extra: dict[str, Any]) -> None:
    """A batch whose tensors disagree is warned of once, whoever counts its samples."""
    batches = [extra | {"x": torch.zeros(size, 4), "y": torch.zeros(size, dtype=torch.long)} for size in (4, 4, 2)]
    task = Supervised(nn.Linear(4, 3), cross_entropy, inputs="x", targets="y")
    trainer = Trainer([ValidationSchedule(epochs=1)] if how == "fit" else [], device="cpu")
    if how == "fit":
        result = trainer.fit(task, batches, validation=batches, optimizer=torch.optim.SGD, epochs=2)
        assert result.progress.samples == 20
    elif how == "own loop":
        with trainer.run(task, batches, optimizer=torch.optim.SGD, epochs=1) as run:
            for _ in run.epochs():
                for batch in run.batches():
                    run.step(task.training_step(run, batch))
        result = run.result
        assert result.progress.samples == 10
    else:
        result = getattr(trainer, how)(task, batches)
        assert result.progress.samples == 10
    assert ["class_weights: [7]" in warning for warning in result.warnings] == [True] * ("class_weights" in extra)


@pytest.mark.parametrize("phase", ["validate", "test"])
@pytest.mark.parametrize("size", [10, 11])
@pytest.mark.parametrize("by_sampler", [False, True])
def test_samples_that_drop_last_leaves_out_are_noted(phase: str, size: int, by_sampler: bool) -> None:
    data = TensorDataset(torch.zeros(size, 4), torch.zeros(size, dtype=torch.long))
    sampler = BatchSampler(SequentialSampler(data), 5, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler) if by_sampler else DataLoader(data, 5, drop_last=True)
    result = getattr(Trainer(device="cpu"), phase)(linear_classifier(), {"hard": loader})
    assert result.progress.samples == 10
    notes = [note for note in result.notes if "leaves out" in note]
    assert ["1 of 11 samples" in note for note in notes] == [True] * (size % 5)


def test_a_batch_sampler_that_leaves_out_samples_is_refused_by_predict() -> None:
    data = TensorDataset(torch.zeros(11, 4), torch.zeros(11, dtype=torch.long))
    loader = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 5, drop_last=True))
    with pytest.raises(ValueError, match="drop_last=False"):
        Trainer(device="cpu").predict(linear_classifier(), loader)
