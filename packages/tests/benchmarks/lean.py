"""The loop itself, and handlers in it that do nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import heliograph as h
from heliograph.packages.tests.benchmarks.harness import Batch, Loss, Seconds, Train, Turns, race, sgd, tiny_model
from ignite.engine import Engine
from torch import Tensor, nn
from torch.nn.functional import mse_loss

EPOCHS = 2
HAND, CONTROL = "hand-written", "hand-written once more (control)"
SUPERVISED, OWN_TASK, IGNITE = "heliograph, Supervised", "heliograph, own task", "ignite, no handlers"
NOBODY, NOBODY_AGAIN = "no handlers", "no handlers, once more (control)"
ONE, MANY = "1 handler of BatchEnd", "21 handlers of BatchEnd"


class OwnTask(h.Task):
    """A task as short as can be."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        """Return the loss."""
        inputs, targets = batch
        return mse_loss(self.model(inputs), targets)


def by_hand(loader: Iterable[Batch], epochs: int, loss_fn: Loss = mse_loss) -> None:
    """Train as one does without a framework."""
    model = tiny_model()
    optimizer = sgd(model.parameters())
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = loss_fn(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
            optimizer.step()
            optimizer.zero_grad()


def fit_supervised(loader: Iterable[Batch], epochs: int, loss_fn: Loss = mse_loss) -> None:
    """Train without plugins."""
    h.Trainer(device="cpu").fit(h.Supervised(tiny_model(), loss_fn), loader, optimizer=sgd, epochs=epochs)


def fit_own_task(loader: Turns, epochs: int) -> None:
    """Train without plugins, and without `Supervised`."""
    h.Trainer(device="cpu").fit(OwnTask(tiny_model()), loader, optimizer=sgd, epochs=epochs)


def ignite(loader: Iterable[Batch], epochs: int, loss_fn: Loss = mse_loss) -> None:
    """Train with Ignite, no handlers; the loss is its step's output, as a handler would need it."""
    model = tiny_model()
    optimizer = sgd(model.parameters())

    def step(engine: Engine, batch: Any) -> Tensor:
        inputs, targets = batch
        loss = loss_fn(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
        optimizer.step()
        optimizer.zero_grad()
        return loss

    Engine(step).run(loader, max_epochs=epochs)


def with_handlers(number: int) -> Train:
    """Return a fit with so many handlers that do nothing."""

    def fit(loader: Turns, epochs: int) -> None:
        trainer = h.Trainer(device="cpu")
        for _ in range(number):
            trainer.bus.on(h.BatchEnd, idle_handler())
        trainer.fit(h.Supervised(tiny_model(), mse_loss), loader, optimizer=sgd, epochs=epochs)

    return fit


def idle_handler() -> Any:
    """Return a new function: one that is connected already would not be connected twice."""

    def idle(run: h.Run, event: h.BatchEnd) -> None:
        pass

    return idle


def race_loops(seed: int) -> Seconds:
    """Time the loops."""
    variants = {
        HAND: by_hand,
        CONTROL: by_hand,
        SUPERVISED: fit_supervised,
        OWN_TASK: fit_own_task,
        IGNITE: ignite,
    }
    return race(variants, EPOCHS, seed)


def race_handlers(seed: int) -> Seconds:
    """Time handlers in the loop."""
    variants = {
        NOBODY: with_handlers(0),
        NOBODY_AGAIN: with_handlers(0),
        ONE: with_handlers(1),
        MANY: with_handlers(21),
    }
    return race(variants, EPOCHS, seed)
