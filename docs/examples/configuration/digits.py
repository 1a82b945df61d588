"""The task, the model and the data that digits.yaml and own_task.yaml name."""

import heliograph as h
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


class Net(nn.Sequential):
    def __init__(self, hidden: int = 64, dropout: float = 0.2) -> None:
        super().__init__(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10))


def images(first: int, last: int) -> TensorDataset:
    pixels, labels = (torch.tensor(each[first:last]) for each in load_digits(return_X_y=True))
    return TensorDataset(pixels.float() / 16, labels)


class Digits(h.DataModule):
    def __init__(self, held_out: int = 297) -> None:
        self.border = 1797 - held_out

    def train(self) -> Dataset:
        return images(0, self.border)

    def validation(self) -> Dataset:
        return images(self.border, 1797)


class Classify(h.Task):
    def __init__(self, hidden: int = 64, smoothing: float = 0.0) -> None:
        self.model = Net(hidden)
        self.loss = nn.CrossEntropyLoss(label_smoothing=smoothing)

    def training_step(self, run: h.Run, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return self.loss(self.model(inputs), labels)

    def validation_step(self, run: h.Run, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        inputs, labels = batch
        outputs = self.model(inputs)
        return {"loss": self.loss(outputs, labels), "accuracy": h.accuracy(outputs, labels)}
