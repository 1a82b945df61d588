"""What the loops on a GPU train: a tiny MLP, a ResNet-18 on images of 32 x 32, a GPT of 124 million weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from heliograph.packages.tests.benchmarks.comparison import Block
from heliograph.packages.tests.benchmarks.harness import SIZE, tiny_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention


@dataclass(frozen=True)
class Work:
    """What one comparison trains.

    Attributes:
        name: in the table.
        model: makes the model.
        loss_fn: of (outputs, targets).
        optimizer: makes the optimizer of some parameters.
        batch: draws a batch of (inputs, targets).
        steps: how many are timed.
        warm_up: how many come before.
        precision: in which the forward pass computes.
    """

    name: str
    model: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    steps: int
    warm_up: int
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a GPT, and of its batches."""

    vocabulary: int = 50_304
    length: int = 1024
    width: int = 768
    heads: int = 12
    layers: int = 12
    batch: int = 8


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.joint, self.out = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)

    def forward(self, values: Tensor) -> Tensor:
        """Return the values that every place takes from those before it."""
        batch, length, width = values.shape
        joint = self.joint(values).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and two linear layers, each beside a shortcut."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.first, self.attention, self.second = nn.LayerNorm(width), Attention(sizes), nn.LayerNorm(width)
        self.linear = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, values: Tensor) -> Tensor:
        """Return the values of the next layer."""
        values = values + self.attention(self.first(values))
        return values + self.linear(self.second(values))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder such as GPT-2: with the sizes by default, 124 million weights, those of the embedding used twice."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(sizes.vocabulary, sizes.width), nn.Embedding(sizes.length, sizes.width)
        self.layers = nn.Sequential(*(Layer(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a score for each token of the vocabulary, at each place."""
        values = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.layers(values)))  # type: ignore[no-any-return]


def resnet_of_small_images(widths: tuple[int, ...] = (64, 128, 256, 512)) -> nn.Module:
    """Return a ResNet-18 as it is used for CIFAR: its first convolution has stride 1, and no pooling follows."""
    blocks = [Block(widths[0], widths[0], 1), Block(widths[0], widths[0], 1)]
    for inner, outer in pairwise(widths):
        blocks += [Block(inner, outer, 2), Block(outer, outer, 1)]
    stem = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def loss_of_tokens(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all places."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def works(*, tiny: bool = False) -> list[Work]:
    """Return what is trained; tiny, to try the script out on a CPU."""
    sizes = Sizes(64, 8, 16, 2, 2, 2) if tiny else Sizes()
    images, widths = (2, (4, 8, 8, 8)) if tiny else (128, (64, 128, 256, 512))

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=not tiny)

    def pairs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(SIZE, 16, generator=generator), torch.randn(SIZE, 1, generator=generator)

    def pictures(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(images, 3, 32, 32, generator=generator)
        return drawn, torch.randint(10, (images,), generator=generator)

    def texts(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def steps(full: int, warm_up: int) -> tuple[int, int]:
        return (6, 2) if tiny else (full, warm_up)

    return [
        Work("MLP 16-16-1, batch 8", tiny_model, mse_loss, sgd, pairs, *steps(2000, 200)),
        Work(
            f"ResNet-18, {images} images of 32 x 32",
            lambda: resnet_of_small_images(widths),
            cross_entropy,
            sgd,
            pictures,
            *steps(200, 30),
        ),
        Work(
            f"GPT, 124M, bf16, {sizes.batch} x {sizes.length} tokens" if not tiny else "GPT, tiny, bf16",
            lambda: GPT(sizes),
            loss_of_tokens,
            adamw,
            texts,
            *steps(40, 10),
            precision="bf16",
        ),
    ]
