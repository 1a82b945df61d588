"""Learn features of digits without labels (BYOL), then see what a linear classifier makes of them.

    python docs/examples/byol.py

An online network predicts what a target network, the average of its own weights, makes of another view of the same
image: Grill et al., "Bootstrap Your Own Latent", 2020. It prints the accuracy of linear classifiers that are trained on
50 images with labels: on the learned features, on those of the same network before the training, and on the pixels.
Each is a mean over 20 draws of the 50, and all features are scaled alike: small numbers alone make a classifier worse.
"""

from __future__ import annotations

from copy import deepcopy

import heliograph as h
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedShuffleSplit, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cosine_similarity, grid_sample
from torch.utils.data import TensorDataset

LABELLED, DRAWS = 50, 20


def view(images: Tensor) -> Tensor:
    """Return each image of (batch, 1, 8, 8) a little turned, moved and scaled, with noise."""
    angle, scale = torch.randn(len(images)) * 0.12, 1 + torch.randn(len(images)) * 0.08
    rows = [angle.cos() * scale, -angle.sin(), angle.sin(), angle.cos() * scale]
    turn = torch.stack(rows, dim=1).view(-1, 2, 2)
    transform = torch.cat([turn, torch.randn(len(images), 2, 1) * 0.08], dim=2)
    moved = grid_sample(images, affine_grid(transform, list(images.shape), align_corners=False), align_corners=False)
    return moved + torch.randn_like(moved) * 0.05


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """Return the layers of a convolution that halves the image."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]


def perceptron(inputs: int, outputs: int) -> nn.Module:
    """Return a network with a hidden layer."""
    return nn.Sequential(nn.Linear(inputs, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, outputs))


class Byol(h.Task, h.Plugin):
    """A task that is its own plugin: after each step, the target follows the online network."""

    def __init__(self) -> None:
        self.encoder = nn.Sequential(*convolution(1, 32), *convolution(32, 64), nn.Flatten())
        self.projector, self.predictor = perceptron(256, 32), perceptron(32, 32)
        self.target = deepcopy(nn.Sequential(self.encoder, self.projector)).requires_grad_(False)

    def training_step(self, run: h.Run, batch: tuple[Tensor]) -> Tensor:
        """Return how far the predictions of two views are from the target's, the mean over both directions."""
        views = [view(*batch), view(*batch)]
        online = [self.predictor(self.projector(self.encoder(each))) for each in views]
        one, other = (
            cosine_similarity(each, self.target(seen)) for each, seen in zip(online, views[::-1], strict=True)
        )
        return 2 - 2 * torch.cat([one, other]).mean()

    @h.on(h.StepEnd)
    def follow(self, run: h.Run, event: h.StepEnd) -> None:
        """Move the target's weights a part of the way."""
        online = [*self.encoder.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(list(self.target.parameters()), [each.detach() for each in online], 0.03)


@torch.no_grad()
def probe(encoder: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return how well linear classifiers on its features do, each trained on a few images and tested on the others."""
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    draws = StratifiedShuffleSplit(DRAWS, train_size=LABELLED, random_state=0)
    return float(cross_val_score(classifier, encoder.eval()(images), labels, cv=draws).mean())


def main() -> None:
    """Train, and compare the features."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16
    torch.manual_seed(0)
    task = Byol()
    before = deepcopy(task.encoder)
    checkpoint = h.Checkpoint("runs/byol", every=h.Every(epochs=5), resume="auto")
    h.Trainer([h.RNGCapture(), task, h.LearningRate("step"), checkpoint], device="cpu").fit(
        task,
        TensorDataset(images),
        loader_params={"batch_size": 128, "shuffle": True},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        scheduler=h.warmup_cosine(0.1),
        epochs=40,
    )
    for name, encoder in {"trained": task.encoder, "before": before, "pixels": nn.Flatten()}.items():
        print(f"{name}: accuracy {probe(encoder, images, labels):.3f}")


if __name__ == "__main__":
    main()
