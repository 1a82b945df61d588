"""The training in the tests of Ray datasets, for workers and other processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import heliograph as h
import numpy as np
import torch
from heliograph.tests.kit import sgd
from torch import Tensor, nn
from torch.utils.data import TensorDataset

ROWS, RANKS, BATCH_SIZE = 69, 2, 4  # an odd number, so that the last global batch is filled up
COLUMNS = ("x", "y")
Batch = dict[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Trained:
    """A training, as a rank saw it."""

    batches: list[list[float]]
    weight: float
    metrics: dict[str, float]
    position: str
    reasons: tuple[str, ...]


def features(ids: Batch) -> Batch:
    """Return inputs and targets of numbered rows."""
    numbers = ids["id"].astype(np.float32)[:, None]
    return {"x": numbers / ROWS, "y": numbers * 2}


def in_memory() -> TensorDataset:
    """Return the same rows as a PyTorch dataset."""
    columns = features({"id": np.arange(ROWS)})
    return TensorDataset(*(torch.from_numpy(columns[name]) for name in COLUMNS))


def train(
    dataset: Any,
    folder: Path,
    *,
    steps: int | None = None,
    collate_fn: Callable[[Batch], Any] | None = None,
    **params: Any,
) -> Trained:
    """Train for two epochs or so many steps, with the global batch of two ranks; resume from the folder."""
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    plugins = [
        h.RNGCapture(),
        h.SaveSchedule(h.Every(steps=3)),
        h.ValidationSchedule(h.Every(epochs=1)),
        h.Checkpoint(folder, resume="auto"),
    ]
    trainer, seen = h.Trainer(plugins, device="cpu"), []

    def see(run: h.Run, event: h.BatchEnd) -> None:
        inputs: Tensor = run.batch[0]
        seen.append(inputs.flatten().tolist())

    trainer.bus.on(h.BatchEnd, see)
    result = trainer.fit(
        h.Supervised(model, nn.functional.mse_loss),
        dataset,
        validation=dataset,
        loader_params=cast("h.LoaderParams", {"global_batch_size": BATCH_SIZE * RANKS, **params}),
        optimizer=sgd(),
        epochs=2,
        steps=steps,
    )
    assert result.resume is not None
    resume = result.resume
    return Trained(seen, model.weight.item(), result.metrics, resume.position, resume.reasons)
