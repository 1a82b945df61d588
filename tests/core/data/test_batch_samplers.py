"""The user's own map-style loaders: rewired on a copy, gone to any position without loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from heliograph import SequentialSampler
from heliograph.core.data.dataloader import MapSource
from heliograph.core.data.dealt import (
    DealtBatches,
    DealtSamples,
    OpaqueOrder,
    SeekableOrder,
    order_of,
)
from heliograph.core.data.sizes import Share
from heliograph.core.data.source_choice import source_of
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

Make = Callable[..., Any]
Read = Callable[..., list[Any]]


def indices(batches: list[Any]) -> list[list[int]]:
    return [[int(row[0]) for row in batch] for batch in batches]


class Backwards:
    """A sampler of a user's own that keeps the small protocol, and counts what it is asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.yielded = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return self.indices(0, 0, 0)

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[int]:
        for index in range(self.size - 1 - start, -1, -1):
            self.yielded += 1
            yield index


class Growing(Sampler[list[int]]):
    """A batch sampler of a user's own that draws, with batches of 1, 2, 3, ... samples."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(21).tolist()
        for size in range(1, 7):
            yield [order.pop() for _ in range(size)]

    def __len__(self) -> int:
        return 6


class SamplerByEpoch(Sampler[int]):
    """Orders by the epoch that it is given."""

    epoch = -1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, 8))

    def __len__(self) -> int:
        return 8 - self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "sequential": lambda data, **how: DataLoader(data, 4, **how),
    "drop_last": lambda data, **how: DataLoader(data, 4, drop_last=True, **how),
    "shuffle": lambda data, **how: DataLoader(data, 4, shuffle=True, **how),
    "generator": lambda data, **how: DataLoader(data, 4, shuffle=True, generator=generator(), **how),
    "replacement": lambda data, **how: DataLoader(data, 4, sampler=RandomSampler(data, True, 40), **how),
    "part": lambda data, **how: DataLoader(data, 4, sampler=RandomSampler(data, num_samples=17), **how),
    "weighted": lambda data, **how: DataLoader(data, 4, sampler=WeightedRandomSampler([1.0, 2.0] * 11, 22), **how),
    "weighted, generator": lambda data, **how: DataLoader(
        data, 4, sampler=WeightedRandomSampler([1.0, 2.0] * 11, 22, generator=generator()), **how
    ),
    "subset": lambda data, **how: DataLoader(data, 4, sampler=SubsetRandomSampler(range(3, 20)), **how),
    "distributed": lambda data, **how: DataLoader(data, 4, sampler=DistributedSampler(data, 2, 1), **how),
    "batch sampler": lambda data, **how: DataLoader(
        data, batch_sampler=BatchSampler(RandomSampler(data), 3, drop_last=False), **how
    ),
    "own batch sampler": lambda data, **how: DataLoader(data, batch_sampler=Growing(), **how),
    "no batches": lambda data, **how: DataLoader(data, batch_size=None, shuffle=True, **how),
    "no batches, weighted": lambda data, **how: DataLoader(
        data, batch_size=None, sampler=WeightedRandomSampler([1.0] * 22, 9), **how
    ),
    "list": lambda data, **how: DataLoader(data, 4, sampler=[3, 1, 2, 8, 9, 21, 0], **how),
    "protocol": lambda data, **how: DataLoader(data, 4, sampler=Backwards(22), **how),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", LOADERS)
def test_every_kind_is_the_same_with_workers_and_from_any_position(kind: str, drawing: Make, read: Read) -> None:
    make = LOADERS[kind]
    whole = read(make(drawing()))
    first = read(make(drawing()), epochs=[0])

    assert whole[: len(first)] == first
    assert whole[len(first) :] != first
    assert read(make(drawing(), num_workers=1), epochs=[1]) == whole[len(first) :]
    for start in (1, len(first) - 1):
        assert read(make(drawing()), epochs=[1], batch=start) == whole[len(first) + start :]


@pytest.mark.parametrize("kind", LOADERS)
def test_the_samples_are_those_that_the_loader_means(kind: str, drawing: Make, read: Read) -> None:
    torch.manual_seed(4)
    plain = [batch.tolist() for batch in LOADERS[kind](drawing())]
    ours = read(LOADERS[kind](drawing()), epochs=[0])
    if kind.startswith("no batches"):
        plain, ours = [[row] for row in plain], [[row] for row in ours]

    assert list(map(len, ours)) == list(map(len, plain))
    if kind not in ("replacement", "part", "weighted", "weighted, generator", "no batches, weighted", "drop_last"):
        assert sorted(chain(*indices(ours))) == sorted(chain(*indices(plain)))
    if kind in ("sequential", "drop_last", "list", "protocol", "distributed"):
        assert indices(ours) == indices(plain)


@pytest.mark.parametrize(
    "kind", [kind for kind in LOADERS if kind not in ("sequential", "drop_last", "list", "protocol")]
)
def test_random_orders_differ_from_epoch_to_epoch(kind: str, drawing: Make, read: Read) -> None:
    one, other = (read(LOADERS[kind](drawing()), epochs=[epoch]) for epoch in (0, 1))
    if kind.startswith("no batches"):
        one, other = [one], [other]

    assert indices(one) != indices(other)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_that_is_the_user_s_own_stays_as_it_is(kind: str, drawing: Make, read: Read) -> None:
    data = drawing()
    loader = LOADERS[kind](data)
    before = dict(vars(loader))
    held = [each for each in (loader.generator, getattr(loader.sampler, "generator", None)) if each is not None]
    states = [each.get_state().tolist() for each in held if each is not None]
    read(loader, batch=1)

    assert vars(loader) == before
    assert loader.dataset is data
    if kind != "weighted, generator":  # a sampler that draws by itself draws from its own generator
        assert [each.get_state().tolist() for each in held] == states


def test_its_own_persistent_workers_are_left_alone(drawing: Make, read: Read) -> None:
    loader = DataLoader(drawing(8), 4, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    first = next(batches)
    read(loader)

    assert loader._iterator is batches
    assert [int(row[0]) for row in (*first, *next(batches))] == list(range(8))
    loader._iterator = None


def test_the_seed_of_a_generator_that_was_given_decides(drawing: Make, read: Read) -> None:
    def order(seed: int, run_seed: int) -> list[list[int]]:
        loader = DataLoader(drawing(), 4, shuffle=True, generator=generator(seed))
        return indices(read(loader, epochs=[0], seed=run_seed))

    assert order(3, 5) == order(3, 6)
    assert order(3, 5) != order(4, 5)
    assert indices(read(DataLoader(drawing(), 4, shuffle=True), seed=5)) != indices(
        read(DataLoader(drawing(), 4, shuffle=True), seed=6)
    )


def test_skipping_loads_no_data(drawing: Make, read: Read) -> None:
    for kind in ("shuffle", "weighted", "list", "no batches"):
        data = drawing()
        rest = read(LOADERS[kind](data), epochs=[0], batch=1)
        samples = len(rest) if kind == "no batches" else sum(map(len, rest))
        assert len(data.asked) == samples > 0


def test_a_sampler_with_the_protocol_is_not_read_up_to_the_position(drawing: Make, reading: Any) -> None:
    sampler = Backwards(10_000)
    source = source_of(DataLoader(drawing(10_000), 4, sampler=sampler))
    batch = next(reading(source, 0, 2400))

    assert [int(row[0]) for row in batch] == [399, 398, 397, 396]
    assert sampler.yielded == 4


def test_a_sampler_is_given_the_epoch(drawing: Make, read: Read) -> None:
    assert indices(read(DataLoader(drawing(), 4, sampler=SamplerByEpoch()), epochs=[5])) == [[5, 6, 7]]
    distributed: DistributedSampler[Any] = DistributedSampler(drawing(), 2, 0)
    read(DataLoader(drawing(), 4, sampler=distributed), epochs=[3])
    assert distributed.epoch == 3


def test_a_loader_is_given_the_epoch(drawing: Make, read: Read) -> None:
    class Loader(DataLoader[Any]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    loader = Loader(drawing(), 4)
    read(loader, epochs=[7])
    assert loader.epoch == 7


def test_a_subclass_is_rewired_too(drawing: Make, read: Read) -> None:
    class Loader(DataLoader[Any]):
        def __init__(self, data: Any) -> None:
            super().__init__(data, 4, shuffle=True)

    data = drawing()
    plain = read(DataLoader(drawing(), 4, shuffle=True))
    assert read(Loader(data)) == plain
    assert read(Loader(data), epochs=[0], batch=3) == plain[3:6]
    assert len(data.asked) == 44 + 10


class Halving(DataLoader[Any]):
    """Iterates in a way of its own: leaves every second batch out, and draws."""

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number % 2:
                yield batch.sum().item() + torch.rand(1).item()

    def __len__(self) -> int:
        return super().__len__() // 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_subclass_that_iterates_in_its_own_way_is_read_again(drawing: Make, reading: Any, workers: int) -> None:
    def source() -> MapSource:
        made = source_of(Halving(drawing(), 4, shuffle=True, num_workers=workers))
        assert isinstance(made, MapSource)
        return made

    whole = list(reading(source(), 1))
    torch.rand(9)
    again = source()
    assert list(reading(again, 1, 2)) == whole[2:]
    assert (again.length, len(whole)) == (3, 3)
    assert again.certainty() == ("replayed", ())


def test_batches_of_a_batch_sampler_draw_by_their_samples_positions(drawing: Make) -> None:
    order = OpaqueOrder(Growing(), Share(1, 2), batched=True)
    order.begin(5, 0, 2)
    places = [chosen.position for chosen in order]

    assert [place.first for place in places] == [7, 13, 21, 31]
    assert [place.key for place in places] == [(5, 0, batch, 1) for batch in (2, 3, 4, 5)]
    assert {place.stride for place in places} == {2}


def test_the_last_batch_has_a_place_too(drawing: Make) -> None:
    order = SeekableOrder(SequentialSampler(10), 4, drop_last=False, rank=1, world_size=3)
    order.begin(5, 2, 1)
    batches = list(order)

    assert batches == [[4, 5, 6, 7], [8, 9]]
    assert [batch.position.first for batch in batches] == [13, 25]
    assert [batch.position.key for batch in batches] == [(5, 2, 1, 1), (5, 2, 2, 1)]
    order.begin(5, 2, 9)
    assert list(order) == []


class Own(BatchSampler):
    """A subclass may do anything."""


def test_which_order_stands_in(drawing: Make) -> None:
    data = drawing()
    distributed: DistributedSampler[Any] = DistributedSampler(data, 2, 1)
    orders: list[tuple[DataLoader[Any], type, int, dict[str, Any]]] = [
        (
            DataLoader(data, 4),
            SeekableOrder,
            4,
            {"order": "sequential", "seed": None, "samples": 22, "drop_last": False},
        ),
        (
            DataLoader(data, 4, shuffle=True, drop_last=True),
            SeekableOrder,
            4,
            {"order": "shuffle-1", "seed": None, "samples": 22, "drop_last": True},
        ),
        (
            DataLoader(data, 4, sampler=Backwards(9)),
            SeekableOrder,
            4,
            {"order": "Backwards", "seed": None, "samples": 9, "drop_last": False},
        ),
        (
            DataLoader(data, batch_size=None),
            SeekableOrder,
            1,
            {"order": "sequential", "seed": None, "samples": 22, "drop_last": False},
        ),
        (
            DataLoader(data, 4, sampler=WeightedRandomSampler([1.0], 9)),
            DealtSamples,
            4,
            {"order": "WeightedRandomSampler", "seed": None, "length": 9, "drop_last": False},
        ),
        (
            DataLoader(data, batch_sampler=Own(SequentialSampler(8), 4, drop_last=False)),
            DealtBatches,
            1,
            {"order": "Own", "seed": None, "length": 2},
        ),
        (
            DataLoader(data, batch_size=None, sampler=SubsetRandomSampler(range(5))),
            DealtBatches,
            1,
            {"order": "SubsetRandomSampler", "seed": None, "length": 5},
        ),
        (
            DataLoader(data, 4, sampler=distributed),
            OpaqueOrder,
            4,
            {"order": "DistributedSampler", "seed": 0, "samples": 22, "drop_last": False},
        ),
    ]
    for loader, kind, batch_size, facts in orders:
        order = order_of(loader)
        assert type(order) is kind
        assert order.kind == facts
        assert order.batch_size == batch_size
        assert order.length == len(loader)
