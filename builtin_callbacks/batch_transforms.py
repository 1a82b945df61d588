"""Transforms of batches on the device: a function of your own, Mixup, CutMix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ..events import BatchStart, Lane, PredictBatchStart, Run, TestBatchStart, ValidationBatchStart
from ..events.checks import check_number, check_whole_number, known_names
from ..plugins import Plugin, on

PHASES = ("train", "validation", "test", "predict")


class BatchTransform(Plugin):
    """Replace each batch by the result of a function, on the device.

    The function takes and returns a whole batch, like the transforms of torchvision's `transforms.v2`. It draws from
    the training's random generators: with `RNGCapture`, a resumed run draws the same numbers.

    Args:
        transform: called with a batch on the device; returns the batch to use.
        phases: the phases in which to use it: `train`, `validation`, `test` and `predict`.
        name: the name of the plugin, if you register several.

    Raises:
        TypeError: the transform is not callable.
        ValueError: a phase is unknown.
    """

    def __init__(
        self, transform: Callable[[Any], Any], *, phases: Iterable[str] = ("train",), name: str = "batch_transform"
    ) -> None:
        if not callable(transform):
            raise TypeError(f"BatchTransform(transform) takes a function of a batch, got {transform!r}.")
        self.name, self.transform = name, transform
        self.phases = (phases,) if isinstance(phases, str) else tuple(phases)
        for phase in self.phases:
            if phase not in PHASES:
                raise ValueError(f"phases= has an unknown phase, {phase!r}.{known_names(phase, PHASES)}")

    def describe(self, run: Run) -> str:
        name = getattr(self.transform, "__name__", type(self.transform).__name__)
        return f"changes batches by {name} in {', '.join(self.phases)}"

    @on(BatchStart, ValidationBatchStart, TestBatchStart, PredictBatchStart, lane=Lane.TRANSFORM)
    def apply(self, run: Run, event: BatchStart | ValidationBatchStart | TestBatchStart | PredictBatchStart) -> None:
        """Replace the batch."""
        if run.phase in self.phases and not run.report.is_replay:
            run.batch = self.transform(run.batch)


class _Mixing(Plugin, ABC):
    """Mixes each sample of a training batch with the previous one, cyclically."""

    exclusive = ("mixing",)

    def __init__(self, alpha: float, classes: int | None) -> None:
        self.alpha = check_number("alpha", alpha, more_than=0)
        self.classes = None if classes is None else check_whole_number("classes", classes, at_least=2)

    @on(BatchStart, lane=Lane.TRANSFORM)
    def apply(self, run: Run, event: BatchStart) -> None:
        """Mix the batch."""
        if run.report.is_replay:
            return
        try:
            inputs, targets = run.batch
        except (TypeError, ValueError):
            got = type(run.batch).__name__
            raise TypeError(f"{type(self).__name__} takes batches of (inputs, targets), got {got}.") from None
        share = float(torch.distributions.Beta(self.alpha, self.alpha).sample())
        inputs, share = self.mix(inputs, share)
        run.batch = inputs, _mixed(self._probabilities(targets), share)

    @abstractmethod
    def mix(self, inputs: Tensor, share: float) -> tuple[Tensor, float]:
        """Return the mixed inputs, and the share of the original in each sample."""

    def _probabilities(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return targets
        if self.classes is None:
            kind = type(self).__name__
            raise ValueError(f"{kind} mixes classes as probabilities: pass their number, {kind}(classes=10).")
        return nn.functional.one_hot(targets, self.classes).to(torch.get_default_dtype())


class Mixup(_Mixing):
    """Train on weighted means of two samples (Zhang et al., "mixup", ICLR 2018).

    Each sample of a batch is mixed with the previous one, and so are their targets. Batches are pairs (inputs,
    targets). Class indices [batch] become probabilities [batch, classes], which `nn.functional.cross_entropy` accepts;
    floating-point targets are mixed directly. Training metrics use the mixed targets, evaluations the true ones.

    Args:
        classes: the number of classes; None if targets are floating-point numbers.
        alpha: the weight of each batch is drawn from the distribution Beta(alpha, alpha).

    Raises:
        ValueError: a number is out of range, or, in a run, targets are classes and `classes` is missing.
        TypeError: in a run, a batch is not a pair, or its inputs are not floating-point numbers.
    """

    def __init__(self, classes: int | None = None, *, alpha: float = 0.2) -> None:
        super().__init__(alpha, classes)

    def mix(self, inputs: Tensor, share: float) -> tuple[Tensor, float]:
        """Return the weighted means of the inputs."""
        if not inputs.is_floating_point():
            raise TypeError(f"Mixup needs floating-point inputs, got {inputs.dtype}: divide bytes by 255.")
        return _mixed(inputs, share), share


class CutMix(_Mixing):
    """Train on images with a rectangle of another image (Yun et al., ICCV 2019).

    Each image of a batch gets the rectangle of the previous one, and the targets are weighted by the areas. See `Mixup`
    for targets and metrics.

    Args:
        classes: the number of classes; None if targets are floating-point numbers.
        alpha: the share of each image that remains is drawn for each batch from the distribution Beta(alpha, alpha).

    Raises:
        ValueError: a number is out of range. In a run also if targets are classes and `classes` is missing, or if
            inputs are not images of shape [batch, ..., height, width].
        TypeError: in a run, a batch is not a pair.
    """

    def __init__(self, classes: int | None = None, *, alpha: float = 1.0) -> None:
        super().__init__(alpha, classes)

    def mix(self, inputs: Tensor, share: float) -> tuple[Tensor, float]:
        """Return the images with the rectangle, and the remaining share of their area."""
        if inputs.ndim < 3:
            raise ValueError(f"CutMix takes images [batch, ..., height, width], got inputs of {list(inputs.shape)}.")
        height, width = inputs.shape[-2:]
        top, bottom = _side(height, sqrt(1.0 - share))
        start, end = _side(width, sqrt(1.0 - share))
        mixed = inputs.clone()
        mixed[..., top:bottom, start:end] = inputs.roll(1, 0)[..., top:bottom, start:end]
        return mixed, 1.0 - (bottom - top) * (end - start) / (height * width)


def _mixed(values: Tensor, share: float) -> Tensor:
    return values.roll(1, 0).mul_(1.0 - share).add_(values, alpha=share)


def _side(size: int, share: float) -> tuple[int, int]:
    centre, half = int(torch.randint(size, ())), share * size / 2
    return max(0, round(centre - half)), min(size, round(centre + half))
