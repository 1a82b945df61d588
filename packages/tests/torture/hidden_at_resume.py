"""A program that is another one when it is resumed."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

import heliograph as h
import torch
from heliograph.packages.tests.torture.hidden import LOADED, Hidden, Kind
from heliograph.packages.tests.torture.parts import Parts
from torch import nn


class AtResume(Hidden, is_base=True):
    """What is changed where there is a checkpoint to continue from."""

    def hide(self, parts: Parts) -> None:
        if parts.resumes:
            self.change(parts)

    @abstractmethod
    def change(self, parts: Parts) -> None:
        """Change the program."""


class Precision(AtResume):
    """Another precision at the resume."""

    row, place = "E3", "engine"
    wants: ClassVar[dict[str, Any]] = {"precision": "fp32"}

    def change(self, parts: Parts) -> None:
        parts.engine["precision"] = "bf16"


class Gone(AtResume):
    """A plugin that is gone at the resume."""

    row, place = "E3", "clipping"
    wants: ClassVar[dict[str, Any]] = {"clipping": 0.05}

    def change(self, parts: Parts) -> None:
        del parts.plugins["gradient_clipping"]


class New(AtResume):
    """A plugin that is new at the resume."""

    row, place = "E3", "clipping"
    wants: ClassVar[dict[str, Any]] = {"clipping": None}

    def change(self, parts: Parts) -> None:
        plugin = h.GradientClipping(0.05)
        parts.plugins[plugin.name] = plugin


class Options(AtResume):
    """A plugin that has other options at the resume."""

    row, place = "E3", "clipping"
    wants: ClassVar[dict[str, Any]] = {"clipping": 0.05}

    def change(self, parts: Parts) -> None:
        parts.plugins["gradient_clipping"] = h.GradientClipping(0.5)


class Scales(h.Plugin):
    """Scales the loss; its option is private."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    @h.on(h.BatchStart)
    def scale(self, run: h.Run, event: h.BatchStart) -> None:
        run.control.scale_loss(self._factor, "as it was asked")


class OwnOptions(Hidden):
    """A user's plugin that has other options at the resume."""

    row, place = "E3", "scales"

    def hide(self, parts: Parts) -> None:
        parts.plugins["scales"] = Scales(0.5 if parts.resumes else 2.0)


class Accumulation(AtResume):
    """Another accumulation at the resume."""

    row, place = "E3", "accumulation"
    wants: ClassVar[dict[str, Any]] = {"accumulation": 2}

    def change(self, parts: Parts) -> None:
        parts.plugins["gradient_accumulation"] = h.GradientAccumulation(3)


class Determinism(AtResume):
    """Other determinism flags at the resume."""

    row, place = "E3", "engine"

    def change(self, parts: Parts) -> None:
        parts.engine["deterministic"] = True
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property of torch's own kind


class MatrixProducts(AtResume):
    """Another precision of matrix products at the resume."""

    row, place = "own", "products"

    def change(self, parts: Parts) -> None:
        torch.set_float32_matmul_precision("medium")


class Average(AtResume):
    """Another average of the weights at the resume."""

    row, place = "own", "ema"
    wants: ClassVar[dict[str, Any]] = {"ema": 1}

    def change(self, parts: Parts) -> None:
        plugin = h.EMA(0.5)
        parts.plugins[plugin.name] = plugin


class Loss(AtResume):
    """Another loss at the resume."""

    row, place = "own", "loss"

    def change(self, parts: Parts) -> None:
        parts.loss = partial(nn.functional.cross_entropy, label_smoothing=0.2)


class Dropout(AtResume):
    """Another dropout at the resume."""

    row, place = "own", "dropout"
    wants: ClassVar[dict[str, Any]] = {"dropout": 0.1}

    def change(self, parts: Parts) -> None:
        parts.net.drop.p = 0.5


class Slope(AtResume):
    """Another activation at the resume."""

    row, place = "own", "activation"

    def change(self, parts: Parts) -> None:
        parts.net.activation = nn.LeakyReLU(0.3)


class Augmentation(AtResume):
    """Another augmentation at the resume."""

    row, place = "own", "dataset"
    data: ClassVar[tuple[Kind, ...]] = LOADED

    def change(self, parts: Parts) -> None:
        parts.samples.transform = lambda index: 0.5


class Order(AtResume):
    """Another order of plugins at the resume."""

    row, place = "own", "order"
    wants: ClassVar[dict[str, Any]] = {"draws": ("StepEnd", "BatchStart"), "meddles": True}

    def change(self, parts: Parts) -> None:
        parts.plugins = {name: parts.plugins[name] for name in reversed(parts.plugins)}
