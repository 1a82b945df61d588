"""Orders dealt out to ranks: each sample where one process would read it, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from heliograph import DistributedSampler, RandomSampler
from heliograph.core.data.dealt import EveryNth, OpaqueOrder, knows_ranks, order_of
from heliograph.core.data.position import convert_progress
from heliograph.core.data.sizes import Layout, Share
from heliograph.core.data.source import Reading, Source
from heliograph.core.data.source_choice import source_of
from heliograph.events import Progress
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from torch.utils.data import RandomSampler as TorchRandomSampler

Make = Callable[..., Any]


class Numbers(Dataset[int]):
    """Its samples are their indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Lazy(Sampler[int]):
    """Draws each index when it is asked for it, and says no length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield int(torch.randint(self.size, ()))


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "in order": lambda size: None,
    "shuffled": RandomSampler,
    "weighted": lambda size: WeightedRandomSampler([1.0, *[2.0] * (size - 1)], size),
    "subset": lambda size: SubsetRandomSampler(range(size)),
    "replacing": lambda size: TorchRandomSampler(range(size), replacement=True),
    "lazy": Lazy,
}


def loader_of(kind: str, size: int, batch_size: int, *, drop_last: bool = False) -> DataLoader[Any]:
    return DataLoader(Numbers(size), batch_size, sampler=SAMPLERS[kind](size), drop_last=drop_last)


def shares(world_size: int) -> list[Share]:
    return [Share(rank, world_size) for rank in range(world_size)]


def read(source: Source, epoch: int = 1, batch: int = 0) -> list[list[int]]:
    reading = Reading(5, epoch, batch, True, lambda done, batches: None)
    return [each.tolist() for each in source.open(reading)]


def in_order(of_ranks: list[list[list[int]]]) -> list[int]:
    """Return the samples in the order of the sampler: those of a round of batches lie across the ranks."""
    assert len({tuple(map(len, batches)) for batches in of_ranks}) == 1
    return [sample for batches in zip(*of_ranks, strict=True) for row in zip(*batches, strict=True) for sample in row]


def everything(kind: str, size: int, batch_size: int, *, drop_last: bool = False) -> list[int]:
    return list(chain(*read(source_of(loader_of(kind, size, batch_size, drop_last=drop_last)))))


# One order for any number of ranks.


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", SAMPLERS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_number_of_ranks_reads_the_same_samples_in_the_same_order(kind: str, data: st.DataObject) -> None:
    """Killed anywhere, and resumed with any other number of ranks that shares the global batch, or accumulates it."""
    whole = data.draw(st.sampled_from([1, 4, 6, 12]))
    size = data.draw(st.integers(1, 60))
    worlds = st.sampled_from([world for world in range(1, whole + 1) if not whole % world])
    one, other = data.draw(worlds), data.draw(worlds)
    expected = everything(kind, size, whole)

    before = [source_of(loader_of(kind, size, whole // one), share) for share in shares(one)]
    batches = [read(source) for source in before]
    place = data.draw(st.integers(0, len(batches[0])))
    progress = Progress(epoch=1, batch=place, earlier_batches=len(batches[0])).state_dict()
    sizes = [each for each in (1, 2, 3, 4, 6, 12) if not (whole // other) % each]
    size_then = whole // one if one == other else data.draw(st.sampled_from(sizes))
    after = [source_of(loader_of(kind, size, size_then), share) for share in shares(other)]
    moved = convert_progress(progress, before[0].layout, after[0].layout)
    rest = [read(source, batch=moved["batch"]) for source in after]

    consumed = in_order([each[:place] for each in batches])
    assert consumed == (expected + expected * one)[: len(consumed)]  # filled up from the beginning
    total = (consumed + in_order(rest))[:size]
    assert total == expected
    if before[0].length is not None:
        assert moved["earlier_batches"] == after[0].length == len(read(after[0]))


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_rank_has_equally_many(kind: str, drop_last: bool) -> None:
    for world_size, size in ((2, 21), (3, 22), (4, 17)):
        sources = [source_of(loader_of(kind, size, 2, drop_last=drop_last), share) for share in shares(world_size)]
        batches = [read(source) for source in sources]
        expected = everything(kind, size, 2 * world_size, drop_last=drop_last)

        assert [source.length for source in sources] == (
            [None] * world_size if kind == "lazy" else [*map(len, batches)]
        )
        found = in_order(batches)
        assert found[: len(expected)] == expected
        assert found[len(expected) :] == expected[: -len(expected) % world_size]
        assert all(source.even and not source.as_it_is for source in sources)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("turns", [1, 2])
def test_the_samples_of_a_lazy_sampler_do_not_depend_on_the_accumulation(batch_size: int, turns: int) -> None:
    """Two ranks with whole windows, or one that accumulates: a sampler draws the same."""
    order = everything("replacing", 600, 8)
    found = in_order([read(source_of(loader_of("replacing", 600, batch_size), share)) for share in shares(turns)])
    assert found == order


def test_a_sampler_with_fewer_indices_than_ranks() -> None:
    found = [read(source_of(DataLoader(Numbers(9), 2, sampler=[7, 8]), share)) for share in shares(5)]
    assert found == [[[7]], [[8]], [[7]], [[8]], [[7]]]


# Batches of the user's own.


class Growing(Sampler[list[int]]):
    """Batches of 1, 2, 3, ... samples in an order that is drawn."""

    def __init__(self, batches: int = 5, *, drop_last: bool = False) -> None:
        self.batches, self.drop_last = batches, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        for size in range(1, self.batches + 1):
            yield torch.randint(30, (size,)).tolist()

    def __len__(self) -> int:
        return self.batches


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_of_a_batch_sampler_go_round(drop_last: bool) -> None:
    whole = read(source_of(DataLoader(Numbers(30), batch_sampler=Growing())))
    sources = [
        source_of(DataLoader(Numbers(30), batch_sampler=Growing(drop_last=drop_last)), share) for share in shares(3)
    ]
    expected = whole[:3] if drop_last else [*whole, whole[0]]

    assert [read(source) for source in sources] == [expected[rank::3] for rank in range(3)]
    assert [read(source, batch=1) for source in sources] == [expected[rank::3][1:] for rank in range(3)]
    assert [source.length for source in sources] == [len(expected) // 3] * 3
    assert not any(source.even for source in sources)


def test_their_samples_draw_by_their_positions_in_the_order_of_one_process() -> None:
    firsts = []
    for share in shares(2):
        order = order_of(DataLoader(Numbers(30), batch_sampler=Growing(4)), share)
        order.begin(5, 0, 0)
        firsts.append([(each.position.first, each.position.stride) for each in order])
    assert firsts == [[(0, 1), (3, 1)], [(1, 1), (6, 1)]]  # batches of 1, 2, 3 and 4 samples


def test_so_do_those_of_a_list() -> None:
    batches = [torch.tensor([number]) for number in range(5)]
    sources = [source_of(batches, share) for share in shares(2)]

    assert [read(source) for source in sources] == [[[0], [2], [4]], [[1], [3], [0]]]
    assert [read(source, batch=2) for source in sources] == [[[4]], [[0]]]
    assert [(source.length, source.even, source.as_it_is) for source in sources] == [(3, False, False)] * 2
    assert source_of(batches[:4], Share(1, 2)).even
    assert not source_of([torch.zeros(1), torch.zeros(2)], Share(1, 2)).even


@pytest.mark.parametrize("sampler", [None, WeightedRandomSampler([1.0] * 7, 7)])
def test_and_those_that_are_indices(sampler: Any) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Numbers(7), batch_size=None, sampler=sampler)

    reading = Reading(5, 1, 0, True, lambda done, batches: None)
    whole = list(source_of(loader()).open(reading))
    found = [list(source_of(loader(), share).open(reading)) for share in shares(2)]
    assert found == [whole[::2], [*whole[1::2], whole[0]]]


# What deals out by itself.


class OwnShare(Sampler[int]):
    """A sampler of the user's that knows its rank, by other names than torch's."""

    rank, world_size = 1, 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, 9, 2))

    def __len__(self) -> int:
        return 4


def test_samplers_that_know_their_rank_are_left_alone() -> None:
    torchs: TorchDistributedSampler[Any] = TorchDistributedSampler(Numbers(9), 2, 1, shuffle=False)
    ours = DistributedSampler(RandomSampler(9), 1, 2)
    data, share = Numbers(9), Share(1, 2)
    kept = {
        "torch's": (DataLoader(data, 2, sampler=torchs), [[1, 3], [5, 7], [0]]),
        "ours": (DataLoader(data, 5, sampler=ours), [list(ours.indices(5, 1, 0))]),
        "own": (DataLoader(data, 3, sampler=OwnShare()), [[1, 3, 5], [7]]),
        "batched": (DataLoader(data, batch_sampler=BatchSampler(OwnShare(), 4, False)), [[1, 3, 5, 7]]),
    }
    for loader, batches in kept.values():
        source = source_of(loader, share)
        assert read(source) == batches
        assert source.length == len(batches)
        assert not source.as_it_is
    assert isinstance(order_of(kept["torch's"][0], share), OpaqueOrder)
    assert [source_of(loader, share).even for loader, _ in kept.values()] == [True, True, False, False]
    assert [source_of(loader, share).layout.common for loader, _ in kept.values()] == [True, True, False, False]


def test_and_their_facts_do_not_show_the_rank() -> None:
    def kinds(rank: int, world_size: int) -> list[dict[str, Any]]:
        samplers: list[Any] = [
            TorchDistributedSampler(Numbers(9), world_size, rank),
            DistributedSampler(RandomSampler(9), rank, world_size),
            RandomSampler(9),
            WeightedRandomSampler([1.0] * 9, 9),
        ]
        return [source_of(DataLoader(Numbers(9), 2, sampler=each), Share(rank, world_size)).kind for each in samplers]

    assert kinds(0, 2) == kinds(1, 2) == kinds(2, 3)


def test_who_knows_ranks() -> None:
    assert knows_ranks(TorchDistributedSampler(Numbers(9), 2, 1))
    assert knows_ranks(BatchSampler(OwnShare(), 2, False))
    assert not knows_ranks(RandomSampler(9))
    assert not knows_ranks(None)


def test_nothing_left_for_a_rank_is_an_error() -> None:
    with pytest.raises(ValueError, match="few batches for 2"):
        source_of(DataLoader(Numbers(10), 8, drop_last=True), Share(0, 2))


# Evaluations.


@pytest.mark.parametrize("size", [1, 5, 12, 13])
def test_an_evaluation_reads_each_batch_once(size: int) -> None:
    order = order_of(DataLoader(Numbers(size), 2))
    parts = [EveryNth(order, rank, 4) for rank in range(4)]
    found = []
    for part in parts:
        part.begin(5, 0, 0)
        found.append([list(batch) for batch in part if isinstance(batch, list)])

    assert [part.length for part in parts] == [len(batches) for batches in found]
    whole = [batch for number in range(len(found[0])) for each in found for batch in each[number : number + 1]]
    assert list(chain(*whole)) == list(range(size))
    parts[1].begin(5, 0, 1)
    assert [list(batch) for batch in parts[1] if isinstance(batch, list)] == found[1][1:]


def test_and_draws_what_one_process_would(drawing: Make) -> None:
    order = order_of(DataLoader(drawing(12), 2))
    order.begin(5, 0, 0)
    places = [batch.position for batch in order]
    part = EveryNth(order_of(DataLoader(drawing(12), 2)), 1, 2)
    part.begin(5, 0, 0)

    assert [batch.position for batch in part] == places[1::2]


# Positions.


def layout(world_size: int, batch_size: int | None, batches: int | None = None, **more: Any) -> Layout:
    return Layout(**{"common": True, **more}, world_size=world_size, batch_size=batch_size, batches=batches)


def moved(batch: int, before: Layout, now: Layout, **more: Any) -> dict[str, Any]:
    return convert_progress(Progress(batch=batch, **more).state_dict(), before, now)


def test_a_position_is_the_same_to_the_sample() -> None:
    assert moved(3, layout(2, 4), layout(1, 8))["batch"] == 3
    assert moved(3, layout(2, 4), layout(1, 4))["batch"] == 6
    assert moved(6, layout(1, 4), layout(4, 2))["batch"] == 3
    assert moved(3, layout(2, 4, 3), layout(1, 4, 5))["batch"] == 5  # the end is the end, filled up or not


def test_what_was_counted_in_batches_is_counted_again() -> None:
    counters = moved(2, layout(2, 4, 5), layout(1, 4, 9), epoch=3, earlier_batches=15, skipped_batches=2, steps=17)
    assert {name: counters[name] for name in ("epoch", "batch", "earlier_batches", "skipped_batches", "steps")} == {
        "epoch": 3,
        "batch": 4,
        "earlier_batches": 27,
        "skipped_batches": 4,
        "steps": 17,
    }
    assert moved(0, layout(2, 4), layout(1, 4), earlier_batches=7)["earlier_batches"] == 14
    assert moved(0, layout(2, 4, 5), layout(1, 4, 9), epoch=3, earlier_batches=11)["earlier_batches"] == 22
    assert moved(0, layout(2, None, common=False), layout(1, 4), earlier_batches=7)["earlier_batches"] == 7


def test_during_a_batch_no_run_continues() -> None:
    reported = r"24 samples.*4 processes.*2 processes.*24"
    with pytest.raises(ValueError, match=reported):
        moved(3, layout(2, 4), layout(4, 4))


def test_nor_where_ranks_read_orders_of_their_own() -> None:
    before = layout(2, None, common=False)
    with pytest.raises(ValueError, match="2 processes with separate"):
        moved(3, before, layout(1, None, common=False))
    assert moved(3, before, layout(2, None, common=False))["batch"] == 3
    assert moved(0, before, layout(1, None, common=False))["batch"] == 0
