"""Lightning's own Trainer on the same model, data and optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from heliograph.tests import kit
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Classifier(pl.LightningModule):
    """The model of `kit.linear_classifier`, trained by SGD with a rate of 0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.model = kit.linear_classifier().model

    def _loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def lightning_fit() -> Callable[..., Any]:
    """Return a function that trains with Lightning's Trainer, and returns it."""

    def fit(callbacks: list[Any], module: Any = None, train: int = 4, **options: Any) -> Any:
        quiet = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        ) | {"accelerator": "cpu"}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            warnings.filterwarnings("ignore", ".*GPU available")
            trainer = pl.Trainer(callbacks=callbacks, **{**quiet, **options})
            data: list[Any] = [kit.class_batches(train), kit.class_batches(1)]
            first, second = (DataLoader[Any](each, batch_size=None) for each in data)
            trainer.fit(module or Classifier(), first, second)
        return trainer

    return fit
