"""A training to be watched: bars in a terminal, plain lines in a file or a pipe.

    python docs/examples/terminal.py
    python docs/examples/terminal.py 2>&1 | cat

Press Ctrl-C, and it says where it can resume; the same command then continues there, in the middle of an epoch, and
ends with the same weights as if it had been left alone.
"""

from __future__ import annotations

import heliograph as h
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split


def main() -> h.RunResult:
    """Train, in about five seconds."""
    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    data = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)
    train, held_out = random_split(data, [1500, 297], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    features = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5)]
    task = h.Supervised(
        nn.Sequential(*features, nn.Linear(512, 10)), nn.functional.cross_entropy, metrics={"accuracy": h.accuracy}
    )
    checkpoint = h.Checkpoint("runs/terminal", every=h.Every(steps=25), resume="auto")
    schedules = [h.LogSchedule(steps=25), h.ValidationSchedule(epochs=1)]
    return h.Trainer([h.RNGCapture(), *schedules, checkpoint, h.ProgressBar()]).fit(
        task,
        train,
        loader_params={"batch_size": 25, "shuffle": True},
        validation=held_out,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        epochs=30,
        on_interrupt="return",
    )


if __name__ == "__main__":
    main()
