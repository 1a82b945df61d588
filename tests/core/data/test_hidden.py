"""Whatever a dataset holds or hides: a resumed run is equal to the uninterrupted one, or names the hidden state."""

from __future__ import annotations

import functools
import itertools
import os
import random
import secrets
import threading
import time
import uuid
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import ResumeReport, RNGCapture
from heliograph.core.data.training_data import TrainingData
from heliograph.events import Progress
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset

Make = Callable[..., Any]

STEP, BATCHES = 7, 12  # the run is cut in its second epoch


class By(Dataset[Tensor]):
    """Each sample is its index, and a number by what the dataset holds."""

    def __init__(self, held: Any, draw: Callable[[Any], float]) -> None:
        self.held, self.draw = held, draw

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, self.draw(self.held), 0, 0, 0, 0, 0], dtype=torch.float64)


class Deep:
    """Holds another thing, in a slot and an attribute in turn."""

    __slots__ = ("__dict__", "slot")

    def __init__(self, thing: Any, depth: int) -> None:
        inner = Deep(thing, depth - 1) if depth else thing
        if depth % 2:
            self.slot = inner
        else:
            self.attribute = inner

    def drawn(self) -> float:
        inner = getattr(self, "slot", None) or self.attribute
        return inner.drawn() if isinstance(inner, Deep) else float(inner.random())


@dataclass
class Transform:
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))


class OnTheClass:
    rngs: Any = [random.Random(1)]  # noqa: RUF012  # as users write it

    def drawn(self) -> float:
        return float(self.rngs[0].random())


class Lazy:
    rng: Any = None

    def drawn(self) -> float:
        if self.rng is None:
            self.rng = np.random.default_rng(1)
        return float(self.rng.random())

    @functools.cached_property
    def cached(self) -> random.Random:
        return random.Random(1)


class Local(threading.local):
    def __init__(self) -> None:
        self.rng = random.Random(1)


class Own(np.random.PCG64):
    """A bit generator of the user's own."""


MODULES_OWN = np.random.default_rng(1)
MODULES_LIST = [random.Random(1) for _ in range(3)]
MADE_LATE: dict[str, Any] = {}
Pair = namedtuple("Pair", "one two")  # the untyped kind is looked into as well


def by_module(held: Any) -> float:
    return float(MODULES_OWN.random()) + nested_by_module()


def nested_by_module() -> float:
    return sum(each.random() for each in (one for one in MODULES_LIST))


def made_late(held: Any) -> float:
    if "rng" not in MADE_LATE:
        MADE_LATE["rng"] = random.Random(1)
    return float(MADE_LATE["rng"].random())


def of_object_array(count: int) -> Any:
    array = np.empty(count, dtype=object)
    array[:] = [random.Random(each) for each in range(count)]
    return array


def any_of(held: Any) -> float:
    return float(held[int(torch.randint(len(held), ()))].random())


def boxes(count: int, parts: int = 1) -> list[Any]:
    return [{"id": each, "bbox": [each, 1.0], "parts": [[1.0] for _ in range(parts)]} for each in range(count)]


def closing_over(held: Any) -> Callable[[], float]:
    return lambda: float(held.random())


def spawned(held: Any) -> float:
    return float(np.random.default_rng(held.spawn(1)[0]).random())


KEYED: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "1,500 in a list": (
        lambda: [torch.Generator() for _ in range(1500)],
        lambda held: torch.rand((), generator=held[-1]).item(),
    ),
    "annotations before it": (
        lambda: (boxes(1100, parts=100), [[[[Transform()]]]]),
        lambda held: float(held[1][0][0][0][0].rng.random()),
    ),
    "a generator among annotations": (lambda: [*boxes(1100), random.Random(1)], lambda held: held[-1].random()),
    "a deque": (lambda: deque([random.Random(1), np.random.default_rng(1)], 5), any_of),
    "an object array": (lambda: of_object_array(3), any_of),
    "a large object array": (lambda: of_object_array(1200), any_of),
    "30 levels": (lambda: Deep(np.random.default_rng(1), 30), lambda held: held.drawn()),
    "a bit generator": (lambda: np.random.PCG64(1), lambda held: held.random_raw() / 2**64),
    "one of a class of one's own": (lambda: Own(1), lambda held: held.random_raw() / 2**64),
    "a bit generator wrapped later": (
        lambda: np.random.Philox(1),
        lambda held: float(np.random.Generator(held).random()),
    ),
    "a seed sequence": (lambda: np.random.SeedSequence(1), spawned),
    "defaultdict": (lambda: defaultdict(list, a=[random.Random(1)]), lambda held: held["a"][0].random()),
    "OrderedDict": (lambda: OrderedDict(a=random.Random(1)), lambda held: held["a"].random()),
    "a key of a dict": (lambda: {random.Random(1): 1}, lambda held: next(iter(held)).random()),
    "named tuple": (lambda: Pair(1, random.Random(1)), lambda held: held.two.random()),
    "a module of torch": (
        lambda: nn.ModuleList([nn.Identity(), nn.Sequential(*map(holding, range(9)))]),
        lambda held: held[1][8].held.random(),
    ),
    "on the class": (OnTheClass, lambda held: held.drawn()),
    "a closure": (lambda: closing_over(random.Random(1)), lambda held: held()),
    "a partial of a method": (lambda: functools.partial(random.Random(1).uniform, 0, 1), lambda held: held()),
    "the module's own": (lambda: None, by_module),
    "made at first use": (Lazy, lambda held: held.drawn()),
    "a cached property": (Lazy, lambda held: held.cached.random()),
    "made at first use, in the module": (lambda: MADE_LATE.clear(), made_late),
    "local to a thread": (Local, lambda held: held.rng.random()),
    "the global one, held": (lambda: random.random, lambda held: held()),
}


def holding(number: int) -> nn.Module:
    module = nn.Identity()
    vars(module)["held"] = random.Random(number)
    return module


def counted(held: Any) -> float:
    held["count"] += 1
    return float(held["count"])


def remembered(held: Any) -> float:
    if "drawn" not in held:
        held["drawn"] = torch.rand(()).item()
    return float(held["drawn"])


def remembered_unseen(held: Any) -> float:
    """Draws always, and takes what it drew first."""
    return float(held.setdefault("drawn", torch.rand(()).item()))


def seeded_again(held: Any) -> float:
    random.seed()
    return random.random()


def torch_seeded_again(held: Any) -> float:
    torch.seed()
    return torch.rand(()).item()


def grown(held: Any) -> float:
    held.append(0)
    return float(len(held))


def turned(held: Any) -> float:
    held.rotate(1)
    return float(held[0])


def in_place(held: Tensor) -> float:
    held += 1
    return float(held.item())


def of_both(held: Any) -> float:
    return float(sum(each.random() * 2**place for place, each in enumerate(held)))


HIDDEN: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a set of several": (lambda: {random.Random(1), random.Random(2)}, of_both),
    "sets in a set": (
        lambda: {frozenset([random.Random(1)]), frozenset([random.Random(2)])},
        lambda held: of_both([next(iter(each)) for each in held]),
    ),
    "itertools.count": (itertools.count, lambda held: float(next(held))),
    "itertools.cycle": (lambda: itertools.cycle([1, 5, 2, 9, 3]), lambda held: float(next(held))),
    "a generator function": (lambda: (float(each) for each in itertools.count()), next),
    "an iterator": (lambda: iter([*map(float, range(999))]), next),
    "SystemRandom": (random.SystemRandom, lambda held: held.random()),
    "a counter": (lambda: {"count": 0}, counted),
    "a cache of draws": (dict, remembered),
    "a cache that is drawn for each time": (dict, remembered_unseen),
    "a list that grows": (list, grown),
    "a deque that turns": (lambda: deque(range(50)), turned),
    "a tensor that counts": (lambda: torch.zeros(()), in_place),
    "random.seed()": (lambda: None, seeded_again),
    "torch.seed()": (lambda: None, torch_seeded_again),
    "os.urandom": (lambda: None, lambda held: int.from_bytes(os.urandom(4), "little") / 2**32),
    "secrets": (lambda: None, lambda held: secrets.randbelow(10**9) / 10**9),
    "uuid": (lambda: None, lambda held: uuid.uuid4().int / 2**128),
    "the clock": (lambda: None, lambda held: float(time.perf_counter_ns() % 10**9)),
    "Random()": (lambda: None, lambda held: random.Random().random()),
    "the id of an object that lives on": (list, lambda held: held.append(object()) or float(id(held[-1]))),
}


def resumed(make: Callable[[], Any], fit: Make, **how: Any) -> tuple[bool, ResumeReport, ResumeReport]:
    """Cut a run and continue from there; return whether all is equal, and what both runs say."""
    whole = fit(make(), cut_at=[STEP], **how)
    tail = fit(make(), saved=whole.cuts[STEP], **how)
    assert len(whole.batches) == BATCHES
    assert len(tail.batches) == BATCHES - STEP
    return tail.is_tail_of(whole), whole.result.resume, tail.result.resume


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", KEYED)
def test_what_can_be_keyed_is_keyed(kind: str, fit: Make) -> None:
    make, draw = KEYED[kind]
    is_equal, *said = resumed(lambda: DataLoader(By(make(), draw), 3, shuffle=True), fit)

    assert is_equal
    assert [report.reasons for report in said] == [(), ()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["a deque", "30 levels", "made at first use", "the module's own"])
def test_workers_draw_what_this_process_draws(kind: str, fit: Make) -> None:
    make, draw = KEYED[kind]
    here = fit(DataLoader(By(make(), draw), 3))
    for lives_on in (False, True):
        there = fit(DataLoader(By(make(), draw), 3, num_workers=2, persistent_workers=lives_on))
        assert there.batches == here.batches
        assert there.result.resume == ResumeReport()


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", HIDDEN)
def test_what_cannot_is_named(kind: str, fit: Make) -> None:
    make, draw = HIDDEN[kind]
    is_equal, *said = resumed(lambda: DataLoader(By(make(), draw), 3, shuffle=True), fit)

    assert not is_equal or "set" in kind  # by chance
    for report in said:
        assert report.untracked["train loader"].startswith("By ")


@pytest.mark.parametrize("kind", ["a counter", "os.urandom", "a cache of draws"])
def test_workers_say_it_too(kind: str, fit: Make) -> None:
    make, draw = HIDDEN[kind]
    resume = fit(DataLoader(By(make(), draw), 3, num_workers=2)).result.resume

    assert_facts(resume.untracked["train loader"], "By", "differently each time")


class Collate:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        self.count += 1
        return torch.stack(samples) + self.count


def test_a_collate_function_that_counts(fit: Make) -> None:
    is_equal, *said = resumed(
        lambda: DataLoader(TensorDataset(torch.zeros(18, 7).double()), 3, collate_fn=summed(Collate())), fit
    )

    assert not is_equal
    assert all(report.reasons for report in said)


def summed(collate: Collate) -> Callable[[Any], Tensor]:
    return lambda samples: collate([each for (each,) in samples])


# The probe itself.


class Counted(By):
    """Counts how often it is asked."""

    asked = 0

    def __getitem__(self, index: int) -> Tensor:
        self.asked += 1
        return super().__getitem__(index)


def test_the_first_batch_alone_is_loaded_twice(fit: Make) -> None:
    data = Counted(None, lambda held: 0.0)
    whole = fit(DataLoader(data, 3), cut_at=[STEP])
    assert data.asked == 36 + 3
    fit(DataLoader(data, 3), saved=whole.cuts[STEP])
    assert data.asked == 36 + 3 + 15 + 3


def test_it_can_be_left_out_and_that_is_said(fit: Make) -> None:
    data = Counted(None, lambda held: 0.0)
    for loader in (DataLoader(data, 3), DataLoader(data, 3, num_workers=1)):
        result = fit(loader, seed=None, plugins=[RNGCapture(5, probe=False)]).result
        (reason,) = result.resume.reasons
        assert "Counted was not checked" in reason
        assert "RNGCapture(probe=False)" in reason
    assert data.asked == 36


@pytest.mark.parametrize("probe", [True, False])
def test_what_can_hold_nothing_is_spared(probe: bool, reading: Make) -> None:
    rows = TensorDataset(torch.zeros(18, 7))
    parts: dict[str, Any] = {"a": Subset(rows, range(9)), "b": ConcatDataset([Subset(rows, [*range(9)])])}
    pure: list[Any] = [rows, StackDataset(**parts), StackDataset(*parts.values()), [*range(9)]]
    for plain in pure:
        data = TrainingData([DataLoader(plain, 3)])
        data.key(5, probe=probe)
        list(data.open(Progress(), lambda done, batches: None))
        assert data.resume_facts() == ({}, (), "seeked")


class Once(Counted):
    """Cannot load anything twice."""

    def __getitem__(self, index: int) -> Tensor:
        if self.asked >= 3 and index == 0:
            self.asked = 3
            raise OSError("the tape was at its end")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_second_load_that_fails_fails_no_run(workers: int, fit: Make) -> None:
    result = fit(DataLoader(Once(None, lambda held: 0.0), 3, num_workers=workers), epochs=1).result

    assert result.progress.batches == 6
    (reason,) = result.resume.reasons
    assert_facts(reason, "Once", "not checked", "hidden state")
    assert "OSError: the tape" in reason


def test_what_was_found_once_stays(fit: Make) -> None:
    """A later attempt may begin at a batch that does not show it."""
    whole = fit(DataLoader(By({}, remembered), 3), cut_at=[STEP])
    tail = fit(DataLoader(By({}, lambda held: 0.0), 3), saved=whole.cuts[STEP])

    hidden = whole.result.resume.untracked  # the cache is empty now, and the function another one
    assert hidden["train loader"].startswith("By ")
    assert tail.result.resume.untracked == hidden


@pytest.fixture(autouse=True)
def _modules_generators() -> Iterator[None]:
    yield
    MADE_LATE.clear()
