"""Train a GAN on 1,797 digits, with an optimizer for each network and an average of the weights.

    python docs/examples/gan.py

It draws 64 digits to runs/gan/digits.png. How far a thousand drawn images are from the nearest real one says how good
they are, beside noise; the classes that a linear classifier of real digits sees among them, whether all are alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import heliograph as h
import torch
from matplotlib import image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.utils.data import TensorDataset

NOISE = 32
FOLDER = Path("runs/gan")


class Gan(h.Task):
    """A generator of images of 64 pixels from -1 to 1, and the discriminator that it is to deceive."""

    def __init__(self) -> None:
        self.generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))

    def training_step(self, run: h.Run, batch: tuple[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the loss of each network; each takes its step before the other's loss is computed."""
        (real,) = batch
        fake = self.draw(len(real))
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        smooth = torch.full_like(on_real, 0.9)
        yield "discriminator", cross_entropy(on_real, smooth) + cross_entropy(on_fake, torch.zeros_like(on_fake))
        judged = self.discriminator(fake)
        yield "generator", cross_entropy(judged, torch.ones_like(judged))

    def draw(self, number: int) -> Tensor:
        """Return so many images, (number, 64)."""
        return self.generator(torch.randn(number, NOISE))


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return what trains either network."""
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.999))


def main() -> None:
    """Train, draw, and judge what was drawn."""
    pixels, labels = load_digits(return_X_y=True)
    real = torch.tensor(pixels).float() / 8 - 1
    torch.manual_seed(0)
    task = Gan()
    checkpoint = h.Checkpoint(FOLDER, every=h.Every(epochs=20), resume="auto")
    h.Trainer([h.RNGCapture(), h.EMA(0.995, load_at_end=True), checkpoint], device="cpu").fit(
        task,
        TensorDataset(real),
        loader_params={"batch_size": 64, "shuffle": True},
        optimizer={"generator": adam, "discriminator": adam},
        epochs=200,
    )
    with torch.no_grad():
        drawn = task.draw(1000)
    judge = LogisticRegression(max_iter=200).fit(real, labels)
    for name, images in {"drawn": drawn, "noise": torch.rand_like(drawn) * 2 - 1}.items():
        nearest = torch.cdist(images, real).amin(dim=1).mean()
        shares = torch.tensor(judge.predict(images)).bincount(minlength=10) / len(images)
        print(f"{name}: {nearest:.2f} from the nearest real digit, {int((shares > 0.02).sum())} of 10 classes")
    grid = drawn[:64].view(8, 8, 8, 8).transpose(1, 2).reshape(64, 64)
    image.imsave(FOLDER / "digits.png", grid, cmap="gray")


if __name__ == "__main__":
    main()
