# own_task.py
import heliograph as h
from digits import Net, images
from torch import Tensor, nn
from torch.utils.data import Dataset


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
        images, labels = batch
        return self.loss(self.model(images), labels)

    def validation_step(self, run: h.Run, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        outputs = self.model(images)
        return {"loss": self.loss(outputs, labels), "accuracy": h.accuracy(outputs, labels)}
