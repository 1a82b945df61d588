"""The loop without plugins on a GPU. The batches lie in pinned memory, and both loops copy them without a wait."""

from __future__ import annotations

import heliograph as h
import torch
from heliograph.packages.tests.benchmarks.harness import EPOCH, Batch, Seconds, Turns, batches_of, race, sgd, tiny_model
from heliograph.packages.tests.benchmarks.lean import CONTROL, HAND, SUPERVISED
from torch.nn.functional import mse_loss

DEVICE = "cuda"
EPOCHS = 1


def by_hand(loader: Turns, epochs: int) -> None:
    """Train as one does without a framework."""
    model = tiny_model().to(DEVICE)
    optimizer = sgd(model.parameters())
    for _ in range(epochs):
        for inputs, targets in loader:
            outputs = model(inputs.to(DEVICE, non_blocking=True))
            loss = mse_loss(outputs, targets.to(DEVICE, non_blocking=True))
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
            optimizer.step()
            optimizer.zero_grad()


def fit(loader: Turns, epochs: int) -> None:
    """Train without plugins."""
    h.Trainer(device=DEVICE).fit(h.Supervised(tiny_model(), mse_loss), loader, optimizer=sgd, epochs=epochs)


def race_gpu(seed: int) -> Seconds:
    """Time the loops; each turn ends when the device is done."""
    batches: list[Batch] = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches_of(EPOCH)]
    variants = {HAND: by_hand, CONTROL: by_hand, SUPERVISED: fit}
    return race(variants, EPOCHS, seed, batches, torch.cuda.synchronize)
