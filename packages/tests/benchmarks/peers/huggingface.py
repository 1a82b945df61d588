"""The Trainer of Hugging Face: its loop alone, and with the usual set."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch
from heliograph.packages.tests.benchmarks.harness import SIZE, Batch, Loss, Turns, sgd, tiny_model
from heliograph.packages.tests.benchmarks.usual import LOG, PATIENCE, SAVE, VALIDATION
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainingArguments

logging.getLogger("transformers").setLevel(logging.ERROR)


class Model(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = tiny_model(), loss

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = self.loss if self.training else mse_loss
        return {"loss": loss(self.model(inputs), labels)}


class Loop(Trainer):
    """Trains on the batches of all benchmarks, which are tuples; its own evaluation makes its batches of rows."""

    def __init__(self, loss: Loss, batches: Iterable[Batch], **options: Any) -> None:
        pairs = [pair for batch in VALIDATION for pair in zip(*batch, strict=True)]
        rows: Any = [{"inputs": inputs, "labels": labels} for inputs, labels in pairs]
        model = Model(loss)
        still = torch.optim.lr_scheduler.LambdaLR(optimizer := sgd(model.parameters()), lambda step: 1.0)
        super().__init__(model, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer, still), **options)
        self.batches = batches

    def get_train_dataloader(self) -> Any:
        return self.batches

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, *given: Any, **named: Any
    ) -> Any:
        outputs = model(*(inputs.values() if isinstance(inputs, dict) else inputs))
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def arguments(folder: Path, epochs: int, **options: Any) -> TrainingArguments:
    """Return what both have: no clipping, which the others do not do."""
    return TrainingArguments(str(folder), use_cpu=True, num_train_epochs=epochs, max_grad_norm=0, **options)


def lean(batches: Iterable[Batch], epochs: int, loss: Loss) -> None:
    """Train without callbacks."""
    with TemporaryDirectory() as folder:
        off: dict[str, Any] = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none"}
        loop = Loop(loss, batches, args=arguments(Path(folder), epochs, disable_tqdm=True, **off))
        loop.remove_callback(PrinterCallback)  # it stands in for a bar
        loop.train()


def usual(folder: Path, quiet: TextIO, loader: Turns, epochs: int) -> None:
    """Train with its own callbacks; its bar writes to sys.stderr, and its saves sync nothing."""
    options: dict[str, Any] = {
        "logging_steps": LOG,
        "eval_strategy": "steps",
        "eval_steps": SAVE,
        "save_steps": SAVE,
        "save_total_limit": 1,
        "per_device_eval_batch_size": SIZE,
        "metric_for_best_model": "loss",
        "report_to": "tensorboard",
    }
    callbacks = [EarlyStoppingCallback(PATIENCE)]
    Loop(mse_loss, loader, args=arguments(folder, epochs, **options), callbacks=callbacks).train()
