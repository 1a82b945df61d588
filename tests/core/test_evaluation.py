"""What a validation does for each batch besides the task's step."""

from __future__ import annotations

from abc import ABCMeta
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heliograph import Task, Trainer
from heliograph.tests.kit import linear_classifier
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BATCH = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
LOSS = torch.tensor(0.5)


class Constant(Task):
    """Measures nothing: what is computed is the framework's."""

    def __init__(self, measured: Any) -> None:
        self.measured = measured

    def validation_step(self, run: Any, batch: Any) -> Any:
        return self.measured


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


def test_a_batch_without_values_costs_no_operation() -> None:
    assert operations(Constant(None), 30) == operations(Constant(None), 20)


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
