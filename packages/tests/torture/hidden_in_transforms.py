"""Whatever else makes a dataset load one thing now and another then: entropy from the system, caches, counters."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from math import sin
from random import Random
from typing import Any, ClassVar

import torch
from heliograph.packages.tests.torture.hidden import LOADED, Hidden, Kind
from heliograph.packages.tests.torture.hidden_in_data import InTransform
from heliograph.packages.tests.torture.parts import Parts
from heliograph.packages.tests.torture.samples import Transform

ALL_SEEN: dict[str, Any] = {"epochs": 3, "steps": None}


class Function(Hidden, is_base=True):
    """A function that a dataset calls.

    Attributes:
        call: returns a number that depends on no key.
    """

    place = "dataset"
    data: ClassVar[tuple[Kind, ...]] = LOADED
    call: ClassVar[Callable[[], float]]

    def hide(self, parts: Parts) -> None:
        call = type(self).call
        parts.samples.transform = lambda index: call()


def _reseeded() -> float:
    random.seed()
    return random.random()


def _torch_reseeded() -> float:
    torch.seed()
    return torch.rand(()).item()


class Reseeds(Function):
    """random.seed() in a dataset."""

    row, call = "E4", staticmethod(_reseeded)


class TorchReseeds(Function):
    """torch.seed() in a dataset."""

    row, call = "E4", staticmethod(_torch_reseeded)


class Urandom(Function):
    """os.urandom in a dataset."""

    row, call = "E4", staticmethod(lambda: os.urandom(1)[0] / 256)


class Clock(Function):
    """The time in a dataset."""

    row, call = "E4", staticmethod(lambda: time.time_ns() % 1009 / 1009)


class Unseeded(Function):
    """random.Random() without a seed in a dataset."""

    row, call = "own", staticmethod(lambda: Random().random())


class Identifier(Function):
    """uuid4 in a dataset."""

    row, call = "own", staticmethod(lambda: uuid.uuid4().int / 2**128)


class OfCache:
    def __init__(self) -> None:
        self.known: dict[int, float] = {}

    def __call__(self, index: int) -> float:
        if index not in self.known:
            self.known[index] = random.random()
        return self.known[index]


class Cached(InTransform):
    """A dataset that caches what it drew."""

    row, wants, made = "E3", ALL_SEEN, OfCache


class Memoised(InTransform):
    """A memo of draws in a closure."""

    row, wants, made = "own", ALL_SEEN, staticmethod(lambda: cache(lambda index: random.random()))


class OfLoads:
    def __init__(self) -> None:
        self.loads = 0

    def __call__(self, index: int) -> float:
        self.loads += 1
        return sin(self.loads)


class Counting(InTransform):
    """A dataset that counts what it loads."""

    row, made = "own", OfLoads


def _numbers() -> Transform:
    def drawn() -> Iterator[float]:
        generator = Random(3)
        while True:
            yield generator.random()

    stream = drawn()
    return lambda index: next(stream)


class Coroutine(InTransform):
    """A Python generator in a dataset."""

    row, made = "own", staticmethod(_numbers)


def _quasirandom() -> Transform:
    engine: Any = torch.quasirandom.SobolEngine(1, scramble=True, seed=1)  # type: ignore[no-untyped-call]  # torch's
    return lambda index: float(engine.draw(1))


class Sobol(InTransform):
    """A quasirandom engine in a dataset."""

    row, made = "own", staticmethod(_quasirandom)


class OfSlowness:
    def __init__(self) -> None:
        self.loads = 0

    def __call__(self, index: int) -> float:
        self.loads += 1
        return float(self.loads % 29 == 0)


class Slowly(InTransform):
    """A dataset whose state shows only now and then."""

    row, made = "own", OfSlowness
