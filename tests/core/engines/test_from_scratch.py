"""An engine without a base class: what `LoopEngine` says is all that a run asks of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    Checkpoint,
    DeviceEngine,
    Every,
    GradientAccumulation,
    GradientClipping,
    LogSchedule,
    NaNGuard,
    RNGCapture,
    SaveSchedule,
    Supervised,
    Trainer,
    ValidationSchedule,
)
from heliograph.core.engines.contract import LoopEngine
from heliograph.tests.kit import sgd
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

Modules = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]


class OwnEngine:
    """One process on the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.rank = self.local_rank = 0
        self.world_size = 1
        self.is_main = self.is_local_main = True
        self.life: list[str] = []

    @property
    def watch(self) -> None:
        return None

    def process(self) -> AbstractContextManager[None]:
        return nullcontext()

    def set_up(self, task: Any, modules: Modules, optimizers: Optimizers) -> None:
        self.life.append("set up")

    def tear_down(self) -> None:
        self.life.append("torn down")

    def abandon(self) -> None:
        self.life.append("abandoned")

    def move(self, batch: Any) -> Any:
        return batch

    def feed(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return forward

    def bind_evaluation(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return forward

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor, /) -> None:
        self.backward_scaled(loss, 1.0)

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        torch.autograd.backward(loss, torch.tensor(scale))

    def backward_for(self, loss: Tensor, scale: float, parameters: Sequence[Tensor]) -> None:
        torch.autograd.backward(loss, torch.tensor(scale), inputs=parameters)

    def exchange_gradients(self, parameters: Sequence[Tensor]) -> None:
        pass

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        return optimizer.step

    def bind_zero_grad(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        return optimizer.zero_grad

    def clip_gradients(self, parameters: Iterable[Tensor], norm: float | None, norm_type: float = 2.0) -> Tensor:
        chosen = list(parameters)
        if norm is not None:
            return clip_grad_norm_(chosen, norm, norm_type)
        return get_total_norm([each.grad for each in chosen if each.grad is not None], norm_type)

    def reduce(self, value: Any, how: str = "mean") -> Any:
        return value

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return value

    def barrier(self) -> None:
        pass

    @property
    def waited_seconds(self) -> float:
        return 0.0

    def vote(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def refusing(self, plugin: str, event: str) -> AbstractContextManager[None]:
        return nullcontext()

    def writing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pack(self, modules: Modules, optimizers: Optimizers) -> tuple[dict[str, Any], dict[str, Any]]:
        weights = {name: each.state_dict() for name, each in modules.items()}
        return weights, {name: each.state_dict() for name, each in optimizers.items()}

    def unpack(
        self, modules: Modules, optimizers: Optimizers, states: tuple[Mapping[str, Any], Mapping[str, Any]]
    ) -> None:
        for name, module in modules.items():
            module.load_state_dict(states[0][name])
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(states[1][name])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def trained(engine: LoopEngine, folder: Path, epochs: int) -> dict[str, Tensor]:
    """Train with much of what asks something of an engine, from the last checkpoint on; return the weights."""
    torch.manual_seed(0)
    task = Supervised(nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1)), nn.functional.mse_loss)
    batches = [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(6)]
    plugins = [RNGCapture(1), GradientAccumulation(2), GradientClipping(0.5), NaNGuard(), LogSchedule(Every(steps=1))]
    saving = [Checkpoint(folder, resume="auto"), SaveSchedule(Every(epochs=1)), ValidationSchedule(Every(epochs=1))]
    trainer = Trainer([*plugins, *saving], engine=engine)
    result = trainer.fit(
        task,
        batches,
        validation=batches,
        optimizer=sgd(momentum=0.9),
        epochs=epochs,
    )
    assert (result.status, result.progress.steps) == ("completed", 3 * epochs)
    return task.model.state_dict()


def test_an_engine_that_only_keeps_the_contract_trains_validates_saves_and_resumes(tmp_path: Path) -> None:
    engine = OwnEngine()
    trained(engine, tmp_path / "own", epochs=1)
    resumed = trained(engine, tmp_path / "own", epochs=2)
    straight = trained(DeviceEngine("cpu"), tmp_path / "straight", epochs=2)
    assert engine.life == ["set up", "torn down"] * 2
    for name, each in straight.items():
        assert torch.equal(resumed[name], each), name


class Several:
    """A task with two optimizers, whose validation fails."""

    def __init__(self) -> None:
        self.one, self.other = nn.Linear(2, 1), nn.Linear(2, 1)

    def training_step(self, run: Any, batch: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield "one", self.one(batch).sum()
        yield "other", self.other(batch).sum()

    def validation_step(self, run: Any, batch: Tensor) -> None:
        raise KeyError("on purpose")


def test_it_may_step_several_optimizers_and_learns_of_a_failure() -> None:
    engine, task = OwnEngine(), Several()
    before = [each.weight.detach().clone() for each in (task.one, task.other)]
    trainer, data = Trainer(engine=engine), [torch.ones(3, 2)]
    trainer.fit(task, data, optimizer={"one": torch.optim.SGD, "other": torch.optim.SGD}, epochs=1)
    assert all(torch.all(each.weight < then) for each, then in zip((task.one, task.other), before, strict=True))
    with pytest.raises(KeyError, match="on purpose"):
        trainer.validate(task, data)
    assert engine.life == ["set up", "torn down", "set up", "abandoned"]
