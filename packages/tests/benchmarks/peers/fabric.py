"""Lightning Fabric: the hand-written loop, with its engine; it has nothing for a usual set."""

from __future__ import annotations

from collections.abc import Iterable

from heliograph.packages.tests.benchmarks.harness import Batch, Loss, sgd, tiny_model
from lightning.fabric import Fabric


def lean(batches: Iterable[Batch], epochs: int, loss: Loss) -> None:
    """Train with its model, optimizer and backward pass."""
    fabric = Fabric(accelerator="cpu", devices=1)
    plain = tiny_model()
    model, optimizer = fabric.setup(plain, sgd(plain.parameters()))
    for _ in range(epochs):
        for inputs, targets in batches:
            fabric.backward(loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
