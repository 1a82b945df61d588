"""A small training around an engine, as a run goes about it, for the tests of engines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import torch
from heliograph import (
    Every,
    GradientAccumulation,
    LogSchedule,
    RNGCapture,
    RunResult,
    Supervised,
    Trainer,
    ValidationSchedule,
    accuracy,
)
from heliograph.core.data.loaders import LoaderParams
from heliograph.core.engines.device import DeviceEngine
from heliograph.core.engines.options import modules_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 3, bias=False))


class Fitting:
    """A task with one model."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model or net()

    def training_step(self, run: Any, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch).float().square().mean()
        return loss


class Generating(Fitting):
    """A task of several losses."""

    def training_step(self, run: Any, batch: Tensor) -> Any:
        yield "optimizer", super().training_step(run, batch)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * step + rank))


class Training:
    """A small loop around an engine, as a run goes about it."""

    def __init__(self, engine: DeviceEngine, task: Any, make: Make = adamw) -> None:
        self.engine, self.task = engine, task
        self.modules = modules_of(task)
        self.optimizer = make(list(nn.ModuleList(self.modules.values()).parameters()))
        self.optimizers = {"optimizer": self.optimizer}

    def __enter__(self) -> Training:
        with ExitStack() as stack:
            stack.enter_context(self.engine.process())
            self.engine.set_up(self.task, self.modules, self.optimizers)
            self.forward = self.engine.bind(self.task.training_step)
            self.process = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.engine.tear_down()
        else:
            self.engine.abandon()
        self.process.__exit__(kind, error, trace)

    def go(self, steps: range, *, micro: int = 1, clip: float | None = None) -> list[float]:
        """Take steps; return the gradients' norms."""
        engine, norms = self.engine, []
        step, zero_grad = engine.bind_step(self.optimizer), engine.bind_zero_grad(self.optimizer)
        for number in steps:
            for part in range(micro):
                if part + 1 < micro:
                    with engine.no_sync():
                        engine.backward_scaled(self.loss(number, part), 1 / micro)
                else:
                    engine.backward_scaled(self.loss(number, part), 1 / micro)
            engine.unscale(self.optimizer)
            norms.append(engine.clip_gradients(self.parameters, clip).item())
            step()
            zero_grad()
        return norms

    def loss(self, number: int, part: int = 0) -> Tensor:
        loss: Tensor = self.forward(None, batch(number, 10 * part + self.engine.rank))
        return loss

    @property
    def parameters(self) -> list[Tensor]:
        return [each for group in self.optimizer.param_groups for each in group["params"]]

    def pack(self) -> Any:
        return deepcopy(self.engine.pack(self.modules, self.optimizers))


def weights(training: Training) -> list[Tensor]:
    """Return the weights of a training that is over, with the states of their optimizer."""
    state = training.optimizer.state_dict()["state"]
    parts = [each for module in training.modules.values() for each in module.state_dict().values()]
    return [*parts, *(each for values in state.values() for each in values.values())]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def fitted(engine: DeviceEngine, *plugins: Any) -> tuple[RunResult, list[Tensor]]:
    """Fit on two ranks, in windows of two micro-batches, with validations; return the weights, too."""
    numbers = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(44, 5, generator=numbers), torch.randint(0, 3, (44,), generator=numbers))
    task = Supervised(net(), nn.functional.cross_entropy, metrics={"accuracy": accuracy})
    asked = [ValidationSchedule(Every(epochs=1)), LogSchedule(Every(steps=2))]
    trainer = Trainer([RNGCapture(1), GradientAccumulation(2), *asked, *plugins], engine=engine)
    params: LoaderParams = {"batch_size": 4, "shuffle": True}
    sets: Any = {"": data}
    result = trainer.fit(task, data, loader_params=params, validation=sets, optimizer=adamw, epochs=2)
    return result, list(task.model.state_dict().values())
