"""Lightning's Trainer: its loop alone, and with the usual set."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import lightning.pytorch as pl
from heliograph.packages.tests.benchmarks.harness import Batch, Loss, Turns, sgd, tiny_model
from heliograph.packages.tests.benchmarks.usual import LOG, PATIENCE, SAVE, VALIDATION
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    """The model of all benchmarks."""

    def __init__(self, loss: Loss, *, logs: bool) -> None:
        super().__init__()
        self.model, self.loss, self.logs = tiny_model(), loss, logs

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        loss = self.loss(self.model(inputs), targets)
        if self.logs:
            self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, targets = batch
        self.log("validation_loss", mse_loss(self.model(inputs), targets), batch_size=len(inputs))

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


def lean(batches: Iterable[Batch], epochs: int, loss: Loss) -> None:
    """Train without callbacks."""
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=epochs, enable_model_summary=False, **off)
    trainer.fit(Module(loss, logs=False), batches)


def usual(folder: Path, quiet: TextIO, loader: Turns, epochs: int) -> None:
    """Train with its own callbacks; its bar writes to sys.stdout, and its saves sync nothing."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=TensorBoardLogger(folder),
        log_every_n_steps=LOG,
        val_check_interval=SAVE,
        check_val_every_n_epoch=None,  # steps count through epochs
        num_sanity_val_steps=0,
        enable_model_summary=False,
        callbacks=[
            TQDMProgressBar(refresh_rate=LOG),
            EarlyStopping("validation_loss", patience=PATIENCE),
            ModelCheckpoint(folder, every_n_train_steps=SAVE),
        ],
    )
    validation: Any = VALIDATION  # a list would be a list of loaders to it
    trainer.fit(Module(mse_loss, logs=True), loader, DataLoader(validation, batch_size=None))
