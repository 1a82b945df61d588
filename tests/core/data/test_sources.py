"""Loaders other than a map-style DataLoader: iterable datasets, sequences, and anything else that can be iterated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import Replay, Trainer, TrainStart
from heliograph.core.data.dataloader import IterableSource, MapSource, OpaqueSource
from heliograph.core.data.source import SequenceSource
from heliograph.core.data.source_choice import source_of
from heliograph.core.data.training_data import TrainingData
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

Make = Callable[..., Any]
Read = Callable[..., list[Any]]

HOW: dict[str, dict[str, Any]] = {
    "here": {},
    "2 workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1},
}


def rows(batches: list[Any]) -> list[Any]:
    return [row for batch in batches for row in batch]


# Iterable datasets.


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", HOW)
def test_an_iterable_dataset_draws_by_its_position(how: str, flowing: Make, collate: Any, read: Read) -> None:
    def made() -> DataLoader[Any]:
        return DataLoader(flowing(), 4, collate_fn=collate, **HOW[how])

    whole = read(made())
    random.seed(8)
    torch.manual_seed(8)
    assert read(made()) == whole
    assert sorted(row[0] for row in rows(read(made(), epochs=[0])) if row[0] >= 0) == list(range(22))
    assert len({row[1] for row in rows(whole)}) == len(rows(whole))
    first = len(read(made(), epochs=[0]))
    assert read(made(), epochs=[1], batch=2) == whole[first + 2 :]


def test_persistent_workers_are_given_the_epoch(flowing: Make, read: Read) -> None:
    fresh = read(DataLoader(flowing(), 4, num_workers=2), epochs=[0, 1, 2])
    persistent = read(DataLoader(flowing(), 4, num_workers=2, persistent_workers=True), epochs=[0, 1, 2])

    assert fresh == persistent


def test_an_iterable_dataset_of_whole_batches(flowing: Make, read: Read) -> None:
    whole = read(DataLoader(flowing(), None))
    assert [row[0] for row in whole] == [*range(22), *range(22)]
    assert read(DataLoader(flowing(), None), epochs=[1], batch=5) == whole[27:]


class Reported(IterableDataset[int]):
    """Is given the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch, self.epoch])


def test_an_iterable_dataset_is_given_the_epoch(read: Read) -> None:
    assert read(DataLoader(Reported(), 2), epochs=[3]) == [[3, 3]]
    assert read(DataLoader(Reported(), 2, num_workers=1), epochs=[3]) == [[3, 3]]


class Held(IterableDataset[float]):
    def __init__(self) -> None:
        self.own = np.random.default_rng(1)

    def __iter__(self) -> Iterator[float]:
        return (self.own.random() for _ in range(9))


def test_generators_that_an_iterable_dataset_holds_are_keyed(read: Read) -> None:
    whole = read(DataLoader(Held(), 3))
    assert len({number for batch in whole for number in batch}) == 18
    assert read(DataLoader(Held(), 3), epochs=[1], batch=1) == whole[4:]
    assert read(DataLoader(Held(), 3, num_workers=1)) == whole


@pytest.mark.sample(4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("sized", [True, False])
def test_a_training_over_an_iterable_dataset_is_resumed(
    how: str, sized: bool, flowing: Make, sized_flowing: Make, fit: Make
) -> None:
    def made() -> DataLoader[Any]:
        return DataLoader((sized_flowing if sized else flowing)(), 4, **HOW[how])

    each = len(list(made()))
    cuts = (2, each, each + 1)
    whole = fit(made(), cut_at=cuts)
    for step in cuts:
        resumed = fit(made(), saved=whole.cuts[step])
        assert resumed.is_tail_of(whole)
        assert len(resumed.batches) == 2 * each - step
        assert resumed.result.resume.position == "replayed"
        assert resumed.result.resume.reasons == ()


def test_another_number_of_workers_is_refused_within_an_epoch(flowing: Make, fit: Make) -> None:
    whole = fit(DataLoader(flowing(), 4, num_workers=1), cut_at=[3])
    with pytest.raises(ValueError, match="workers was 1 and is 0"):
        fit(DataLoader(flowing(), 4), saved=whole.cuts[3])


# Reading again.


def replays(loader: Any, saved: Any, noisy: Make) -> list[tuple[int, int]]:
    reported: list[tuple[int, int]] = []
    trainer = Trainer(device="cpu")
    trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
    trainer.bus.on(Replay, lambda run, event: reported.append((event.done, event.batches)))
    trainer.fit(noisy(), loader, epochs=2, optimizer=torch.optim.SGD)
    return reported


def test_reading_again_is_reported(drawing: Make, flowing: Make, fit: Make, noisy: Make) -> None:
    def cut(loader: Any, step: int) -> Any:
        return fit(loader, cut_at=[step], seed=None).cuts[step]

    iterable = DataLoader(flowing(), 4)
    assert replays(iterable, cut(iterable, 9), noisy) == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert replays(iterable, cut(iterable, 6), noisy) == [(done, 6) for done in range(7)]  # who knows that it ended?
    mapped = DataLoader(drawing(), 4)
    assert replays(mapped, cut(mapped, 9), noisy) == []


def test_data_that_have_become_fewer(flowing: Make, fit: Make) -> None:
    cut = fit(DataLoader(flowing(), 4), cut_at=[5]).cuts[5]
    with pytest.raises(ValueError, match="ended after 3 batches"):
        fit(DataLoader(flowing(12), 4), saved=cut)


# Sequences and others.


def batches(count: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 7, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_is_gone_to_at_once(kind: Any, fit: Make) -> None:
    whole = fit(kind(batches()), cut_at=[2, 5, 7])
    for step in (2, 5, 7):
        resumed = fit(kind(batches()), saved=whole.cuts[step])
        assert resumed.is_tail_of(whole)
        assert resumed.result.resume.reasons == ()


class Drawing:
    """An iterable of batches that draws from all three generators, and from one of its own."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(2)

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(5):
            noise = random.gauss(0, 1) + np.random.randn() + np.random.default_rng().random() + self.own.random()
            yield torch.randn(3, 7, dtype=torch.float64) + noise


class Sized(Drawing):
    def __len__(self) -> int:
        return 5


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", [Drawing, Sized])
@pytest.mark.parametrize("step", [1, 4, 5, 8])
def test_an_iterable_that_draws_repeats_itself(kind: Any, step: int, fit: Make) -> None:
    whole = fit(kind(), cut_at=[step])
    resumed = fit(kind(), saved=whole.cuts[step])

    assert resumed.is_tail_of(whole)
    assert resumed.result.resume.position == "replayed"
    assert resumed.result.resume.reasons == ()
    assert len({str(batch) for batch in whole.batches}) == 10


def test_a_subclass_of_list_may_iterate_otherwise(read: Read) -> None:
    class Last(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            return reversed(self)

    assert read(Last([1, 2, 3]), epochs=[0]) == [3, 2, 1]


def test_a_loader_by_index_alone(read: Read) -> None:
    class Old:
        def __getitem__(self, index: int) -> int:
            return [7, 8, 9][index]

    assert read(Old(), epochs=[0], batch=1) == [8, 9]


def test_an_iterable_is_given_the_epoch(read: Read) -> None:
    class Shuffled(list[int]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch])

    assert read(Shuffled(), epochs=[4, 6]) == [4, 6]


def test_without_rng_capture_an_iterable_draws_from_the_training_s_stream(reading: Any) -> None:
    torch.manual_seed(3)
    plain = list(Drawing())
    torch.manual_seed(3)
    random.seed(1)
    np.random.seed(1)
    source = source_of(Drawing())
    before = random.getstate()
    ours = list(reading(source, apart=False))

    assert len(ours) == len(plain) == 5
    assert random.getstate() != before


def test_which_source_reads_what(drawing: Make, flowing: Make) -> None:
    sources: dict[Any, tuple[Any, dict[str, Any]]] = {
        MapSource: (DataLoader(drawing(), 4), {"source": "map", "draws_per": "batch"}),
        IterableSource: (DataLoader(flowing(), 4), {"source": "iterable"}),
        SequenceSource: ([1, 2], {"source": "sequence", "batches": 2}),
        OpaqueSource: (Drawing(), {"source": "iterator", "loader": "Drawing"}),
    }
    for kind, (loader, facts) in sources.items():
        source = source_of(loader)
        assert type(source) is kind
        assert source.loader is loader
        assert source.kind.items() >= facts.items()
        assert source.kind is not source_of(loader).kind


@pytest.mark.parametrize("workers", [0, 2])
def test_a_validation_draws_by_position_whoever_loads_it(workers: int) -> None:
    class Noisy(Dataset[Tensor]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([index, random.random(), np.random.rand(), np.random.default_rng().random()])

    def validated(workers: int) -> list[list[float]]:
        data = TrainingData([[1]])
        data.key(5)
        loader = DataLoader(Noisy(), 2, num_workers=workers)
        batches = [batch for times in range(2) for batch in data.evaluate(loader, 0, times)]
        data.close()
        return [batch.flatten().tolist() for batch in batches]

    first = validated(0)

    assert validated(workers) == first
    assert first[0] != first[3]  # the second validation draws again
