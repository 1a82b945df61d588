"""State of tasks, of their losses and metrics."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from math import sin
from random import Random
from typing import Any, ClassVar

import heliograph as h
from heliograph.packages.tests.torture.hidden import Hidden
from heliograph.packages.tests.torture.parts import Parts
from torch import Tensor, nn


class Factored(h.Supervised):
    """Multiplies the loss by a number of its own."""

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        return super().training_step(run, batch) * self.factor()

    def factor(self) -> float:
        raise NotImplementedError


class InTask(Hidden, is_base=True):
    """A state of a task."""

    place = "task"
    kind: ClassVar[type[Factored]]

    def hide(self, parts: Parts) -> None:
        parts.task = self.kind


class Counts(Factored):
    steps_taken = 0

    def factor(self) -> float:
        self.steps_taken += 1
        return 1 + sin(self.steps_taken) / 2


class InAttribute(InTask):
    """A counter that a task goes by."""

    row, kind = "E3", Counts


class ThirdParty:
    """A generator of a library that nobody knows."""

    def __init__(self) -> None:
        self.state = 12345

    def random(self) -> float:
        self.state = (1103515245 * self.state + 12345) % 2**31
        return self.state / 2**31


class DrawsByItself(Factored):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.generator = ThirdParty()

    def factor(self) -> float:
        return 0.5 + self.generator.random()


class ThirdPartyGenerator(InTask):
    """A third party's generator in a task."""

    row, kind = "E3", DrawsByItself


class Cycles(Factored):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.weights = itertools.cycle([0.5, 1.0, 1.5, 0.8, 1.2])

    def factor(self) -> float:
        return next(self.weights)


class Cycle(InTask):
    """An itertools.cycle in a task."""

    row, kind = "E3", Cycles


class Defaults(Factored):
    def factor(self, seen: list[int] = []) -> float:  # noqa: B006  # this is what is to be found
        seen.append(len(seen))
        return 1 + sin(len(seen)) / 2


class MutableDefault(InTask):
    """A default argument that changes."""

    row, kind = "E3", Defaults


class OnClass(Factored):
    calls: ClassVar[int] = 0

    def factor(self) -> float:
        OnClass.calls += 1
        return 1 + sin(OnClass.calls) / 2


class ClassAttribute(InTask):
    """A counter on a task's class."""

    row, kind = "own", OnClass


class OnFunction(Factored):
    def factor(self) -> float:
        function: Any = OnFunction.factor
        function.calls = getattr(function, "calls", 0) + 1
        return 1 + sin(function.calls) / 2


class FunctionAttribute(InTask):
    """A counter on a task's method."""

    row, kind = "own", OnFunction


class Streams(Factored):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.factors = self.drawn()

    def drawn(self) -> Iterator[float]:
        generator = Random(3)
        while True:
            yield 0.5 + generator.random()

    def factor(self) -> float:
        return next(self.factors)


class PythonGenerator(InTask):
    """A Python generator in a task."""

    row, kind = "own", Streams


class Replays(Factored):
    """Trains on what came some batches before, too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.former: deque[Any] = deque(maxlen=4)

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        loss = h.Supervised.training_step(self, run, batch)
        if self.former:
            loss = loss + h.Supervised.training_step(self, run, self.former[0]) / 2
        self.former.append(batch)
        return loss


class ReplayBuffer(InTask):
    """A replay buffer in a task."""

    row, kind = "own", Replays


class Moving:
    """A loss that goes by how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += outputs.requires_grad
        return nn.functional.cross_entropy(outputs, targets) * (1 + sin(self.calls) / 2)


class InLoss(Hidden):
    """A loss function that counts."""

    row, place = "E3", "loss"

    def hide(self, parts: Parts) -> None:
        parts.loss = Moving()


class Running:
    """A metric that remembers."""

    def __init__(self) -> None:
        self.largest = 0.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.largest = 0.9 * max(self.largest, float(outputs.max()))
        return outputs.mean() + self.largest


class InMetric(Hidden):
    """A metric that remembers."""

    row, place = "E3", "metric"

    def hide(self, parts: Parts) -> None:
        parts.metrics["largest"] = Running()
