"""Generators are found wherever they are held, in an order that every process sees."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import pickle
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.data.keyed import KeyedGenerators
from heliograph.core.data.training_data import TrainingData
from heliograph.core.data.users_code import search
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slots:
    __slots__ = ("__hidden", "empty", "shown")

    def __init__(self, hidden: Any, shown: Any) -> None:
        self.__hidden, self.shown = hidden, shown


class OnTheClass:
    rng = np.random.default_rng(1)


class Crop(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator, self.weight = generator, nn.Parameter(torch.zeros(1))


class Pictures(Dataset[int]):
    def __init__(self, *transforms: Any) -> None:
        self.transforms, self.paths = transforms, [("a", 1), ("b", 2)]

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


def find_generators(root: object) -> list[Any]:
    return search(root).generators


def closing_over(generator: Any) -> Callable[[], Any]:
    def transform() -> Any:
        return generator.random(), late  # the cell of `late` is never filled

    if generator is None:
        late = 1
        del late
    return transform


def with_defaults(generator: Any, other: Any) -> Callable[..., Any]:
    return lambda first=generator, *, second=other: (first, second)


def test_generators_are_found_wherever_they_are_held() -> None:
    a, b, c, d = np.random.default_rng(1), np.random.RandomState(1), random.Random(1), torch.Generator()
    e, f, g = np.random.RandomState(np.random.PCG64(1)), np.random.SFC64(1), np.random.SeedSequence(1)
    deep: Any = a
    for _ in range(5000):
        deep = [deep]
    cases: list[tuple[Any, list[Any]]] = [
        (a, [a]),
        (Holder(x=a, y=1, z=b), [a, b]),
        (Slots(a, b), [a, b]),
        (OnTheClass(), [OnTheClass.rng]),
        ({"x": c, "y": [d, (a,)]}, [c, d, a]),
        (closing_over(a), [a]),
        (with_defaults(a, b), [a, b]),
        (functools.partial(with_defaults(c, None), a, second=b), [a, b, c]),
        (Holder(draw=a.normal, pick=c.random, rand=b.rand, own=Pictures(d).__getitem__), [a, c, b, d]),
        (Pictures(Crop(d), closing_over(a)), [d, a]),
        (Subset(ConcatDataset([Pictures(a), Pictures(Crop(d))]), [0]), [a, d]),
        (Holder(x=a, y=[a, a], z=Holder(x=a)), [a]),
        (Holder(x=torch.zeros(3), y=np.array([a, b], dtype=object), z=random, k=Holder, s={1, 2}), [a, b]),
        (Holder(x=random.SystemRandom(), y=e), [e]),
        ([0] * 1000 + [a], [a]),
        (deep, [a]),
        ((f, g), [f, g]),
        (None, []),
    ]
    for holder, expected in cases:
        found = find_generators(holder)
        assert len(found) == len(expected), holder
        assert all(one is other for one, other in zip(sorted(found, key=id), sorted(expected, key=id), strict=True))


def test_the_order_of_what_is_found_survives_pickling() -> None:
    holder: Any = Holder(
        z=random.Random(1), a={"k": [torch.Generator(), np.random.default_rng(1)]}, m=Holder(x=random.Random(2))
    )
    kinds = [type(each) for each in find_generators(holder)]

    assert kinds == [random.Random, random.Random, torch.Generator, np.random.Generator]
    del holder.a["k"][0]  # torch's cannot be pickled
    found = find_generators(pickle.loads(pickle.dumps(holder)))
    assert isinstance(found[0], random.Random)
    assert found[0].random() == random.Random(1).random()
    assert [type(each) for each in found] == [random.Random, random.Random, np.random.Generator]


def test_generators_of_a_module_that_a_function_names(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inner = ModuleType("users_module"), ModuleType("users_module.inner")
    vars(module).update(rng=random.Random(1), inner=inner, unnamed=random.Random(2))
    vars(inner)["deep"] = np.random.default_rng(3)
    monkeypatch.setitem(sys.modules, "users_module", module)
    monkeypatch.setitem(globals(), "by_another_name", module)

    def importing() -> Any:
        import users_module  # type: ignore[import-not-found]  # made above

        return [(lambda: users_module.rng)() for _ in range(2)]

    def naming() -> Any:
        return by_another_name.inner.deep  # type: ignore[name-defined]  # noqa: F821  # made above

    assert find_generators(importing) == [vars(module)["rng"]]
    assert find_generators(naming) == [vars(inner)["deep"]]


def test_what_holds_itself_is_looked_at_once() -> None:
    holder: Any = Holder(rng=np.random.default_rng(1))
    holder.again = holder.many = [holder, holder]

    assert find_generators(holder) == [holder.rng]


def test_a_library_keeps_its_own_affairs() -> None:
    pool = ThreadPoolExecutor(1)  # counts its threads with an iterator
    logger = logging.getLogger("test")
    logger.rng = random.Random(1)  # type: ignore[attr-defined]

    assert search(pool, logger, threading.Thread(), TrainingData([]))[:2] == ([], [])


def test_the_global_generators_are_seeded_already() -> None:
    assert find_generators([random.random, np.random.rand, torch.default_generator]) == []


def boxes(count: int) -> list[Any]:
    return [{"id": each, "box": [each, 1.0], "of": Place(each)} for each in range(count)]


class Place:
    def __init__(self, number: int) -> None:
        self.number = number

    def drawn(self) -> float:
        return MODULES_OWN.random()


MODULES_OWN = random.Random(1)


def test_among_much_data() -> None:
    rng = random.Random(2)
    data = boxes(1200)
    generators = KeyedGenerators(data, dict(enumerate(data)), rng)

    assert generators.look()
    assert find_generators([data, dict(enumerate(data)), rng]) == [rng, MODULES_OWN]
    assert not generators.look()
    data[7]["rng"] = other = random.Random(3)
    data.append(1)
    assert generators.look()
    assert find_generators([data, rng]) == [rng, other, MODULES_OWN]


def test_very_much_data_that_holds_itself() -> None:
    rng = random.Random(1)
    data: list[Any] = [(number, "name") for number in range(50_000)]
    data[0] = Holder(dataset=data, rng=rng)
    data.append([data, rng])

    assert find_generators(data) == [rng]


def test_large_data_is_looked_through_without_keeping_it() -> None:
    class Weighed(list[Any]):
        """Has weak references."""

    holder = [Weighed(range(5000))]
    gone = weakref.ref(holder[0])
    generators = KeyedGenerators(holder)
    generators.look()
    holder[0] = Weighed()
    generators.look()
    gc.collect()

    assert gone() is None


@pytest.mark.parametrize("hiding", [lambda rng: [rng] * 2000, lambda rng: [closing_over(rng)] * 2000])
def test_among_many(hiding: Any) -> None:
    rng = random.Random(1)
    assert search(hiding(rng))[:2] == ([rng], [])


def test_what_no_key_reaches_is_distinguished() -> None:
    system, counter = random.SystemRandom(), itertools.count()
    assert search(system, {"counter": counter}, {random.Random(1)})[:2] == ([], [system, counter])


def test_reading_a_list_of_one_s_own_loads_nothing() -> None:
    class Lazy(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("loaded")

    rng = random.Random(1)
    assert find_generators(Lazy([rng])) == [rng]
