"""Generators that a dataset holds, each in a way of its own: audit row E4."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from math import sin
from random import Random
from typing import Any, ClassVar

import numpy as np
from heliograph.packages.tests.torture.hidden import LOADED, Hidden, Kind
from heliograph.packages.tests.torture.parts import Parts
from heliograph.packages.tests.torture.samples import Transform

GENERATOR = Random(7)


class InTransform(Hidden, is_base=True):
    """Lies in what a dataset transforms its samples with.

    Attributes:
        made: makes that.
    """

    place = "dataset"
    data: ClassVar[tuple[Kind, ...]] = LOADED
    made: ClassVar[Callable[[], Transform]]

    def hide(self, parts: Parts) -> None:
        parts.samples.transform = type(self).made()


class Held(Hidden, is_base=True):
    """A generator that a transform holds."""

    row, place = "E4", "dataset"
    data: ClassVar[tuple[Kind, ...]] = LOADED

    def hide(self, parts: Parts) -> None:
        parts.samples.transform = Jitter(self.wrap(Random(3)), self.unwrap)

    @abstractmethod
    def wrap(self, generator: Random) -> Any:
        """Return what holds it."""

    def unwrap(self, held: Any) -> Random:
        """Return it."""
        found: Random = next(iter(held))
        return found


class Jitter:
    """A transform; what it holds it does not name."""

    def __init__(self, held: Any, unwrap: Callable[[Any], Random]) -> None:
        self.held, self.unwrap = held, unwrap

    def __call__(self, index: int) -> float:
        return self.unwrap(self.held).random()


class OneForEach:
    """Has a generator for each sample; the first ones are another split's."""

    def __init__(self) -> None:
        self.generators = [Random(number) for number in range(1500)]

    def __call__(self, index: int) -> float:
        return self.generators[1200 + index].random()


class InList(InTransform):
    """1,500 generators in a list."""

    row, made = "E4", OneForEach


class Composed:
    """What such datasets look like: annotations, then transforms in transforms."""

    def __init__(self, annotations: list[Any], last: Any) -> None:
        self.annotations, self.last = annotations, last


class BehindAnnotations(Held):
    """A generator under 1,100 annotations."""

    def wrap(self, generator: Random) -> Any:
        boxes = [{"image": number, "boxes": [[0.0, 1.0] for _ in range(98)]} for number in range(1100)]
        return Composed(boxes, [[[generator]]])

    def unwrap(self, held: Any) -> Random:
        found: Random = held.last[0][0][0]
        return found


class InDeque(Held):
    """A generator in a deque."""

    def wrap(self, generator: Random) -> Any:
        return deque([generator])


class InSet(Held):
    """A generator in a set."""

    def wrap(self, generator: Random) -> Any:
        return {generator}


class InArray(Held):
    """A generator in an array of objects."""

    def wrap(self, generator: Random) -> Any:
        return np.array([generator, None], dtype=object)


class Deep(Held):
    """A generator twelve levels deep."""

    def wrap(self, generator: Random) -> Any:
        held: Any = generator
        for _ in range(12):
            held = [held]
        return held

    def unwrap(self, held: Any) -> Random:
        while isinstance(held, list):
            held = held[0]
        found: Random = held
        return found


class OfBits:
    def __init__(self) -> None:
        self.bits = np.random.PCG64(1)

    def __call__(self, index: int) -> float:
        return float(self.bits.random_raw() / 2**64)


class Bits(InTransform):
    """A bit generator of NumPy's."""

    row, made = "E4", OfBits


class OfSeeds:
    def __init__(self) -> None:
        self.seeds = np.random.SeedSequence(1)

    def __call__(self, index: int) -> float:
        return float(np.random.default_rng(self.seeds.spawn(1)[0]).random())


class Seeds(InTransform):
    """A SeedSequence that spawns."""

    row, made = "E4", OfSeeds


class OfCount:
    def __init__(self) -> None:
        self.numbers = itertools.count()

    def __call__(self, index: int) -> float:
        return sin(next(self.numbers))


class Count(InTransform):
    """An itertools.count."""

    row, made = "E4", OfCount


class OfLazy:
    def __init__(self) -> None:
        self.generator: Random | None = None

    def __call__(self, index: int) -> float:
        if self.generator is None:
            self.generator = Random(3)
        return self.generator.random()


class Lazy(InTransform):
    """A generator that is made when it is first used."""

    row, made = "E4", OfLazy


def _of_module(index: int) -> float:
    return GENERATOR.random()


class OfModule(InTransform):
    """A generator of the module, used by a dataset."""

    row, made = "E4", staticmethod(lambda: _of_module)
