"""TorchTNT: its loop alone, and with the usual set. It has no log of metrics and no save without torchsnapshot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import torch
from heliograph.packages.tests.benchmarks.harness import Batch, Loss, Turns, sgd, tiny_model
from heliograph.packages.tests.benchmarks.usual import LOG, PATIENCE, SAVE, VALIDATION, Log, write_synced
from torch.nn.functional import mse_loss
from torchtnt.framework.callback import Callback
from torchtnt.framework.callbacks import EarlyStopping, TQDMProgressBar
from torchtnt.framework.fit import fit
from torchtnt.framework.state import State
from torchtnt.framework.train import train
from torchtnt.framework.unit import EvalUnit, TrainUnit
from torchtnt.utils.early_stop_checker import EarlyStopChecker


class Unit(TrainUnit[Any], EvalUnit[Any]):  # type: ignore[misc]  # the type checker does not see them
    """Steps as one does by hand; keeps what a log needs."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = tiny_model(), loss
        self.optimizer = sgd(self.model.parameters())
        self.total, self.validation = torch.zeros(()), torch.zeros(())

    def train_step(self, state: State, data: Any) -> None:
        """Do a step."""
        inputs, targets = data
        loss = self.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.last = loss.detach()

    def on_eval_start(self, state: State) -> None:
        """Begin a sum."""
        self.validation = torch.zeros(())

    def eval_step(self, state: State, data: Any) -> None:
        """Add a loss."""
        inputs, targets = data
        self.validation += mse_loss(self.model(inputs), targets)


class LogAndSave(Callback):  # type: ignore[misc]  # nor this one
    """Write the scalars of the hand-written loop every 50 steps, and its checkpoint every 1,000."""

    def __init__(self, folder: Path, unit: Unit) -> None:
        self.folder, self.log = folder, Log(folder, unit.optimizer)

    def on_train_step_end(self, state: State, unit: Any) -> None:
        """Log and save, where it is due."""
        unit.total += unit.last
        steps = unit.train_progress.num_steps_completed
        if steps % LOG == 0:
            self.log.write(unit.total.item() / LOG, steps)
            unit.total.zero_()
        if steps % SAVE == 0:
            parts = {"model": unit.model, "optimizer": unit.optimizer, "progress": unit.train_progress}
            write_synced(self.folder / "last.pth", {name: part.state_dict() for name, part in parts.items()})

    def on_eval_end(self, state: State, unit: Any) -> None:
        """Log the validation."""
        value = unit.validation.item() / len(VALIDATION)
        self.log.writer.add_scalar("validation/loss", value, unit.train_progress.num_steps_completed)

    def on_train_end(self, state: State, unit: Any) -> None:
        """Write the rest."""
        self.log.writer.close()


def lean(batches: Iterable[Batch], epochs: int, loss: Loss) -> None:
    """Train without callbacks."""
    train(Unit(loss), batches, max_epochs=epochs)


def usual(folder: Path, quiet: TextIO, loader: Turns, epochs: int) -> None:
    """Train with its bar and its early stopping; the rest is written here."""
    unit = Unit(mse_loss)
    patience = EarlyStopping("validation", EarlyStopChecker("min", PATIENCE))
    callbacks = [TQDMProgressBar(LOG, quiet), LogAndSave(folder, unit), patience]
    options: dict[str, Any] = {"max_epochs": epochs, "evaluate_every_n_steps": SAVE, "evaluate_every_n_epochs": None}
    fit(unit, loader, VALIDATION, callbacks=callbacks, **options)
