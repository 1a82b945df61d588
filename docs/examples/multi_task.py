"""Train two heads on one trunk: digits from 1,100 images, odd or even from 300 others, two streams at once.

    python docs/examples/multi_task.py

Each batch has a part of both streams; the short one begins again, in another order, until the long one ends. The best
epoch, by the accuracy of digits on 150 images, is loaded at the end, and both heads are tested on the other 247.
"""

from __future__ import annotations

from collections.abc import Mapping

import heliograph as h
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

Parts = Mapping[str, tuple[Tensor, Tensor]]


class TwoHeads(h.Task):
    """A shared trunk with a head for each stream, named as the streams are."""

    def __init__(self) -> None:
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.heads = nn.ModuleDict({"digit": nn.Linear(64, 10), "parity": nn.Linear(64, 2)})

    def training_step(self, run: h.Run, parts: Parts) -> Tensor:
        """Return the sum of both heads' losses; each is logged, too."""
        losses = {name: cross_entropy(self(name, images), labels) for name, (images, labels) in parts.items()}
        for name, loss in losses.items():
            run.track(f"{name}_loss", loss)
        return sum(losses.values(), torch.zeros(()))

    def validation_step(self, run: h.Run, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        """Return both heads' accuracies on images with the label of their digit."""
        images, digits = batch
        labels = {"digit": digits, "parity": digits % 2}
        return {f"{name}_accuracy": h.accuracy(self(name, images), label) for name, label in labels.items()}

    def __call__(self, name: str, images: Tensor) -> Tensor:
        """Return the scores of a head, (batch, classes), for images of (batch, 64)."""
        return self.heads[name](self.trunk(images))


def main() -> h.RunResult:
    """Train, and test the best epoch."""
    images, digits = (torch.tensor(each) for each in load_digits(return_X_y=True))
    images, labels = images.float() / 16, {"digit": digits, "parity": digits % 2}
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    for_digit, for_parity, *held_out = order.split([1100, 300, 150, 247])
    parts = {"digit": for_digit, "parity": for_parity}
    streams = {name: TensorDataset(images[part], labels[name][part]) for name, part in parts.items()}
    validation, test = (TensorDataset(images[part], digits[part]) for part in held_out)
    torch.manual_seed(0)
    task = TwoHeads()
    checkpoint = h.Checkpoint(
        "runs/multi_task",
        every=h.Every(epochs=1),
        keep_best=1,
        monitor="validation/digit_accuracy",
        mode="max",
        resume="auto",
    )
    trainer = h.Trainer([h.RNGCapture(), h.ValidationSchedule(epochs=1), checkpoint, h.LoadBest()])
    trainer.fit(
        task,
        streams,
        loader_params={"batch_size": 50, "shuffle": True},
        validation=validation,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        epochs=20,
    )
    return trainer.test(task, test, loader_params={"batch_size": 247})


if __name__ == "__main__":
    result = main()
    for metric, value in result.metrics.items():
        print(f"{metric} {value:.3f}")
