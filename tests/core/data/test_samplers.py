"""Samplers that begin anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.data.samplers import (
    DistributedSampler,
    Permutation,
    RandomSampler,
    SeekableSampler,
    SequentialSampler,
    algorithm_of,
    is_seekable,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

DATA = TensorDataset(torch.arange(10))


class Backwards:
    """The sampler of a user, as the protocol's docstring has it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[int]:
        return iter(range(self.size - 1 - start, -1, -1))


def loaded(loader: DataLoader[Any]) -> list[int]:
    return [int(number) for (batch,) in loader for number in batch]


def test_random() -> None:
    sampler = RandomSampler(DATA)
    orders = [list(sampler.indices(seed, epoch, 0)) for seed, epoch in [(1, 0), (1, 1), (2, 0)]]

    assert orders[0] == list(Permutation(10, 1, 0).iter_from(0))
    assert [sorted(order) for order in orders] == [list(range(10))] * 3
    assert len({tuple(order) for order in orders}) == 3
    assert list(sampler.indices(1, 0, 4)) == orders[0][4:]
    assert list(sampler.indices(1, 0, 10)) == []
    assert len(sampler) == 10


def test_a_seed_of_its_own_wins() -> None:
    sampler = RandomSampler(10, seed=5)

    assert list(sampler.indices(1, 3, 0)) == list(RandomSampler(10).indices(5, 3, 0))
    assert list(RandomSampler(10, seed=0).indices(1, 0, 0)) == list(RandomSampler(10).indices(0, 0, 0))


def test_sequential() -> None:
    sampler = SequentialSampler(DATA)

    assert list(sampler.indices(1, 2, 0)) == list(range(10))
    assert list(sampler.indices(1, 2, 7)) == [7, 8, 9]
    assert list(sampler) == list(range(10))
    assert len(sampler) == 10


def test_in_the_middle_of_a_thousand_millions() -> None:
    sampler = RandomSampler(10**9)

    assert len(set(islice(sampler.indices(1, 0, 500_000_000), 1000))) == 1000


def test_the_names_of_algorithms() -> None:
    samplers: list[SeekableSampler]
    samplers = [RandomSampler(10), RandomSampler(2**20 + 1), SequentialSampler(10), Backwards(10)]
    names = ["shuffle-1", "feistel-1", "sequential", "Backwards"]

    assert [algorithm_of(sampler) for sampler in samplers] == names
    assert [DistributedSampler(sampler, 0, 2).algorithm for sampler in samplers] == names


def test_what_is_seekable() -> None:
    assert is_seekable(Backwards(3))
    assert is_seekable(DistributedSampler(RandomSampler(3), 0, 1))
    assert not is_seekable(SubsetRandomSampler([0, 1]))
    assert not is_seekable(torch.utils.data.RandomSampler(DATA))


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_plain_loader(workers: int) -> None:
    sampler = RandomSampler(DATA, seed=3)
    loader = DataLoader(DATA, batch_size=4, sampler=sampler, num_workers=workers)
    with torch.random.fork_rng(devices=[]):  # a loader draws a seed for its workers
        first = loaded(loader)
        again = loaded(loader)
        sampler.set_epoch(1)
        second = loaded(loader)

    assert first == again == list(sampler.indices(3, 0, 0))
    assert second == list(sampler.indices(3, 1, 0))


def test_a_distributed_sampler_in_a_plain_loader() -> None:
    sampler = DistributedSampler(RandomSampler(DATA), 1, 2)
    sampler.set_epoch(4)
    with torch.random.fork_rng(devices=[]):
        numbers = loaded(DataLoader(DATA, batch_size=4, sampler=sampler))

    assert numbers == list(RandomSampler(DATA).indices(0, 4, 0))[1::2]


def global_batches(size: int, ranks: int, global_batch: int, **options: Any) -> list[set[int]]:
    per_rank = global_batch // ranks
    shares = [list(DistributedSampler(RandomSampler(size), r, ranks, **options).indices(1, 2, 0)) for r in range(ranks)]
    batches = range(len(shares[0]) // per_rank)
    return [{n for share in shares for n in share[b * per_rank : (b + 1) * per_rank]} for b in batches]


@pytest.mark.parametrize("size", [96, 100, 119])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_global_batch_holds_the_same_samples_for_any_number_of_ranks(size: int, drop_last: bool) -> None:
    alone = global_batches(size, 1, 24)
    order = list(RandomSampler(size).indices(1, 2, 0))
    assert alone == [set(order[at : at + 24]) for at in range(0, size // 24 * 24, 24)]

    full = len(alone)
    assert [global_batches(size, ranks, 24, drop_last=drop_last)[:full] for ranks in (2, 3, 4, 8)] == [alone] * 4


@given(
    size=st.integers(1, 60), ranks=st.integers(1, 9), drop_last=st.booleans(), backwards=st.booleans(), data=st.data()
)
@settings(deadline=None, max_examples=150)
def test_shares(size: int, ranks: int, drop_last: bool, backwards: bool, data: st.DataObject) -> None:
    inner: SeekableSampler = Backwards(size) if backwards else RandomSampler(size)
    if drop_last and size < ranks:
        with pytest.raises(ValueError, match="too few samples"):
            DistributedSampler(inner, 0, ranks, drop_last=True)
        return
    samplers = [DistributedSampler(inner, rank, ranks, drop_last=drop_last) for rank in range(ranks)]
    shares = [list(sampler.indices(1, 2, 0)) for sampler in samplers]
    order = list(inner.indices(1, 2, 0))
    rounds = size // ranks if drop_last else -(-size // ranks)
    start = data.draw(st.integers(0, rounds))

    assert {len(sampler) for sampler in samplers} == {len(share) for share in shares} == {rounds}
    dealt = [share[turn] for turn in range(rounds) for share in shares]
    assert dealt == [order[position % size] for position in range(rounds * ranks)]
    assert [list(sampler.indices(1, 2, start)) for sampler in samplers] == [share[start:] for share in shares]


@pytest.mark.parametrize("kind", [RandomSampler, SequentialSampler])
@pytest.mark.parametrize("size", [5, np.int64(5), [0] * 5])
def test_sizes(kind: Any, size: Any) -> None:
    assert len(kind(size)) == 5


@pytest.mark.parametrize("kind", [RandomSampler, SequentialSampler])
@pytest.mark.parametrize("size", [True, 5.0, None, iter([1])])
def test_no_size(kind: Any, size: Any) -> None:
    with pytest.raises(ValueError, match="needs a dataset"):
        kind(size)


@pytest.mark.parametrize("kind", [RandomSampler, SequentialSampler])
@pytest.mark.parametrize("size", [0, -1, []])
def test_no_samples(kind: Any, size: Any) -> None:
    with pytest.raises(ValueError, match="at least 1 sample"):
        kind(size)


@pytest.mark.parametrize("seed", [True, 1.0, "1"])
def test_no_seed(seed: Any) -> None:
    with pytest.raises(ValueError, match="whole number;"):
        RandomSampler(5, seed=seed)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (0, -1)])
def test_ranks_out_of_range(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"got rank={rank}, world_size={world_size}"):
        DistributedSampler(SequentialSampler(5), rank, world_size)


@pytest.mark.parametrize(("rank", "world_size", "name"), [(False, 2, "rank"), (0, 2.0, "world_size"), ("0", 1, "rank")])
def test_ranks_of_another_type(rank: Any, world_size: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} .*whole number"):
        DistributedSampler(SequentialSampler(5), rank, world_size)


@pytest.mark.parametrize("sampler", [SubsetRandomSampler([0, 1]), torch.utils.data.RandomSampler(DATA), [0, 1], None])
def test_a_sampler_without_the_protocol(sampler: Any) -> None:
    with pytest.raises(TypeError, match=rf"epoch, start\), got {type(sampler).__name__}"):
        DistributedSampler(sampler, 0, 1)


@pytest.mark.parametrize("start", [-1, 6])
def test_starts_out_of_range(start: int) -> None:
    samplers = [RandomSampler(5), SequentialSampler(5), DistributedSampler(SequentialSampler(10), 0, 2)]
    for sampler in samplers:
        with pytest.raises(ValueError, match=rf"start.*0 to 5.*got {start}"):
            sampler.indices(1, 0, start)
