# digits.py
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Sequential):
    def __init__(self, hidden: int = 64, dropout: float = 0.2) -> None:
        super().__init__(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10))


def images(first: int, last: int) -> TensorDataset:
    pixels, labels = (torch.tensor(each[first:last]) for each in load_digits(return_X_y=True))
    return TensorDataset(pixels.float() / 16, labels)
