"""The handwritten digits of scikit-learn, and a dataset that augments them."""

from __future__ import annotations

import random

import numpy as np
import torch
from heliograph.spi import require
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Shifts an image by up to one pixel, changes its contrast and adds noise, differently in each epoch.

    It draws from all three global generators, like augmentation libraries. Heliograph seeds them by the position of the
    batch, so the draws depend neither on the worker nor on a resume.
    """

    def __init__(self, digits: TensorDataset) -> None:
        self.images, self.labels = digits.tensors

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = random.choices((-1, 0, 1), k=2)  # noqa: S311  # not for cryptography
        contrast = np.random.uniform(0.9, 1.1)
        moved = torch.roll(self.images[index], (down, right), (1, 2))
        return contrast * moved + 0.02 * torch.randn_like(moved), self.labels[index]


def digits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Return 1,797 images of 8 x 8 pixels in three fixed, disjoint parts: train, validation, test."""
    require("matplotlib", "The demo", extra="examples")  # before the training, not at its end
    bunch = require("sklearn.datasets", "The demo", extra="examples").load_digits()
    images = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = torch.split(order, [1197, 300, 300])
    train, validation, test = (TensorDataset(images[part], labels[part]) for part in parts)
    return train, validation, test
