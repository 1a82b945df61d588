"""The creators and functions of the tests, in a module that new processes can import."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from heliograph import EpochStart, Plugin, Run, StepEnd, on
from heliograph.core.distributed.launcher import child_queue
from heliograph_ray.creators import CreatorTrainer
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

Config = Mapping[str, Any]
SAMPLES, HELD_OUT = 28, 11


def data(config: Config) -> tuple[TensorDataset, TensorDataset]:
    """Draw from the global generator, which the trainer has seeded."""
    points = torch.randn(SAMPLES + HELD_OUT, 4)
    targets = (points.sum(dim=1) > 0).long()
    return TensorDataset(points[:SAMPLES], targets[:SAMPLES]), TensorDataset(points[SAMPLES:], targets[SAMPLES:])


def only_training_data(config: Config) -> TensorDataset:
    return data(config)[0]


def model(config: Config) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(config.get("dropout", 0.0)), nn.Linear(8, 2))


def optimizer(model: nn.Module, config: Config) -> Optimizer:
    return SGD(model.parameters(), lr=config["lr"], momentum=0.9)


def scheduler(optimizer: Optimizer, config: Config) -> LRScheduler:
    return StepLR(optimizer, 2, 0.5)


def plateau(optimizer: Optimizer, config: Config) -> LRScheduler:
    return ReduceLROnPlateau(optimizer, patience=0, factor=0.1)


def loss(config: Config) -> nn.Module:
    return nn.CrossEntropyLoss(label_smoothing=config["smoothing"])


def send_pid(config: Config) -> None:
    """Send the number of this process to the caller; a hook."""
    queue = child_queue()
    assert queue is not None
    queue.put(os.getpid())


def make(**options: Any) -> CreatorTrainer:
    """Return a trainer with these functions, unless others are given."""
    config = {"lr": 0.1, **options.pop("config", {})}
    own: dict[str, Any] = {
        "model_creator": model,
        "data_creator": data,
        "optimizer_creator": optimizer,
        "loss_creator": nn.CrossEntropyLoss,
        "batch_size": 8,
        "use_cpu": True,
    }
    if callable(options.get("engine")):  # which takes its device itself
        del own["use_cpu"]
    return CreatorTrainer(config=config, **{**own, **options})


def weights(trainer: CreatorTrainer) -> Tensor:
    models = trainer.get_model()
    models = models if isinstance(models, list) else [models]
    return torch.cat([each.detach().flatten() for model in models for each in model.parameters()])


# Functions for training and validation.


def train_as_usual(
    config: Config, model: nn.Module, iterator: Any, criterion: Any, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    """Train as in plain PyTorch."""
    total, correct, count = 0.0, 0, 0
    for inputs, targets in iterator:
        outputs = model(inputs)
        value = criterion(outputs, targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        total += value.item() * len(inputs)
        correct += int((outputs.argmax(dim=1) == targets).sum())
        count += len(inputs)
    return {"own_loss": total / count, "accuracy": torch.tensor(correct / count)}


def train_and_clip(
    config: Config, model: nn.Module, iterator: Any, criterion: Any, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    """Clip the gradients between backward and step, which takes two backward passes; count what was clipped."""
    norms = []
    for inputs, targets in iterator:
        optimizer.zero_grad(set_to_none=config["to_none"])
        outputs = model(inputs)
        (criterion(outputs, targets) / 2).backward(retain_graph=True)
        (criterion(outputs, targets) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
    return {"norm": sum(norms) / len(norms)}


def train_through_the_loop(
    config: Config, model: nn.Module, iterator: Any, criterion: Any, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    """Step through the iterator."""
    for inputs, targets in iterator:
        iterator.step(criterion(model(inputs), targets))
    return {}


def train_and_step_the_scheduler(
    config: Config, model: nn.Module, iterator: Any, criterion: Any, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    returned = train_as_usual(config, model, iterator, criterion, optimizer, scheduler)
    scheduler.step()
    return returned


def train_every_second(
    config: Config, model: nn.Module, iterator: Any, criterion: Any, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    """Accumulate gradients of two batches."""
    for number, (inputs, targets) in enumerate(iterator):
        (criterion(model(inputs), targets) / 2).backward()
        if number % 2 or number + 1 == len(iterator):
            optimizer.step()
    return {"batches": len(iterator)}


def train_the_first(
    config: Config, model: nn.Module, iterator: Any, criterion: Any, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    """Break after the first batch."""
    for inputs, targets in iterator:
        criterion(model(inputs), targets).backward()
        optimizer.step()
        break
    return {"samples": iterator.samples}


def train_nothing(
    config: Config, model: nn.Module, iterator: Any, criterion: Any, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    return {"batches": sum(1 for _ in iterator)}


def validate_as_usual(
    config: Config, model: nn.Module, iterator: Iterable[Any], criterion: Any, scheduler: Any
) -> dict[str, Any]:
    assert not model.training
    assert not torch.is_grad_enabled()
    total, correct, count = 0.0, 0, 0
    for inputs, targets in iterator:
        outputs = model(inputs)
        total += criterion(outputs, targets).item() * len(inputs)
        correct += int((outputs.argmax(dim=1) == targets).sum())
        count += len(inputs)
    return {"loss": total / count, "accuracy": correct / count, "share": count}


def validate_and_step(
    config: Config, model: nn.Module, iterator: Iterable[Any], criterion: Any, scheduler: Any
) -> dict[str, Any]:
    returned = validate_as_usual(config, model, iterator, criterion, scheduler)
    scheduler.step(returned["loss"])
    return returned


# Several models: an encoder and a decoder, each with an optimizer.


def pair(config: Config) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(4, 3), nn.Linear(3, 2)


def pair_of_optimizers(models: list[nn.Module], config: Config) -> list[Optimizer]:
    first, second = models
    return [SGD(first.parameters(), lr=config["lr"], momentum=0.9), Adam(second.parameters(), lr=0.01)]


def pair_of_schedulers(optimizers: list[Optimizer], config: Config) -> list[LRScheduler]:
    first, second = optimizers
    return [StepLR(second, 1, 0.5), StepLR(first, 2, 0.1)]  # in another order than the optimizers


def train_pair(
    config: Config, models: list[nn.Module], iterator: Any, criterion: Any, optimizers: list[Any], schedulers: Any
) -> dict[str, Any]:
    first, second = models
    for inputs, targets in iterator:
        for optimizer in optimizers:
            optimizer.zero_grad()
            criterion(second(first(inputs)), targets).backward()
            optimizer.step()
    return {}


def train_pair_through_the_loop(
    config: Config, models: list[nn.Module], iterator: Any, criterion: Any, optimizers: list[Any], schedulers: Any
) -> dict[str, Any]:
    first, second = models
    for inputs, targets in iterator:
        for number in range(2):
            iterator.step(criterion(second(first(inputs)), targets), number)
    return {}


def validate_pair(
    config: Config, models: list[nn.Module], iterator: Iterable[Any], criterion: Any, schedulers: Any
) -> dict[str, Any]:
    first, second = models
    values = [criterion(second(first(inputs)), targets) * len(inputs) for inputs, targets in iterator]
    return {"loss": sum(values) / HELD_OUT}


# Faults.


class OwnError(Exception):
    """An error of the user's own."""


class Trouble(Plugin):
    """At a step on rank 1, if a file exists: remove it, and die or raise."""

    def __init__(self, file: Path, step: int, what: str) -> None:
        self.file, self.step, self.what = file, step, what

    @on(StepEnd)
    def act(self, run: Run, event: StepEnd) -> None:
        if run.engine.rank == 1 and run.progress.steps == self.step and self.file.exists():
            self.file.unlink()
            if self.what == "raise":
                raise OwnError("the disk is on fire")
            os.kill(os.getpid(), signal.SIGKILL)


def trouble(config: Config) -> list[Plugin]:
    return [Trouble(config["file"], config["step"], config["what"]), SendEpoch()]


class SendEpoch(Plugin):
    """Send the number of each pass at its start."""

    ranks = "main"

    @on(EpochStart)
    def send(self, run: Run, event: EpochStart) -> None:
        if run.report.queue is not None:
            run.report.queue.put(event.epoch)
