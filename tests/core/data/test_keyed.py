"""Draws of loading are a function of (seed, epoch, position), and loading leaves the training's stream alone."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.data.keyed import KeyedDataset, KeyedIterable, KeyedPosition, keyed_batch
from heliograph.core.data.source_choice import source_of
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

Make = Callable[..., Any]
Read = Callable[..., list[Any]]

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 2, "prefetch_factor": 1},
    {"num_workers": 2, "prefetch_factor": 5, "persistent_workers": True},
]


def test_epochs_seeds_samples_and_collate_functions_draw_apart(drawing: Make, collate: Any, read: Read) -> None:
    batches = read(DataLoader(drawing(), batch_size=4, collate_fn=collate))
    other = read(DataLoader(drawing(), batch_size=4, collate_fn=collate), seed=6)
    rows = [row for batch in batches + other for row in batch]

    assert len(batches) == 12
    assert [row[0] for batch in batches[:6] for row in batch if row[0] >= 0] == list(range(22))
    for place in range(1, 7):
        assert len({row[place] for row in rows}) == len(rows) == 2 * 2 * (22 + 6)


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", WORKERS, ids=lambda how: "-".join(f"{name}={value}" for name, value in how.items()))
@pytest.mark.parametrize("shuffle", [True, False])
def test_draws_depend_on_no_worker(drawing: Make, collate: Any, read: Read, how: dict[str, Any], shuffle: bool) -> None:
    here = read(DataLoader(drawing(), batch_size=4, shuffle=shuffle, collate_fn=collate))
    there = read(DataLoader(drawing(), batch_size=4, shuffle=shuffle, collate_fn=collate, **how))

    assert here == there


SPAWNED = """
import random
import numpy as np
import torch

class Spawned(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), np.random.default_rng().random(), torch.rand(1)])
"""


def test_spawned_workers_draw_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Read) -> None:
    (tmp_path / "spawned_dataset.py").write_text(SPAWNED)
    monkeypatch.syspath_prepend(tmp_path)  # a child that is spawned imports the module of what it is given
    made = importlib.import_module("spawned_dataset").Spawned
    here = read(DataLoader(made(), batch_size=4, shuffle=True))
    there = read(DataLoader(made(), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context="spawn"))

    assert here == there


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [1, 3, 5])
def test_from_any_position_on_it_is_the_tail(drawing: Make, collate: Any, read: Read, workers: int, start: int) -> None:
    def loader(workers: int) -> DataLoader[Any]:
        return DataLoader(drawing(), batch_size=4, shuffle=True, collate_fn=collate, num_workers=workers)

    assert read(loader(workers), epochs=[1], batch=start) == read(loader(0), epochs=[1])[start:]


class Holding(Dataset[Tensor]):
    """Holds a generator of each kind, in attributes, a list and a closure."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)
        self.more: list[Any] = [np.random.RandomState(3), random.Random(3)]
        generator = torch.Generator()
        self.draw: Callable[[], float] = lambda: torch.rand(1, generator=generator, dtype=torch.float64).item()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        state, python = self.more
        return torch.tensor([self.own.random(), state.rand(), python.random(), self.draw()], dtype=torch.float64)


@pytest.mark.parametrize("how", WORKERS, ids=lambda how: "-".join(f"{name}={value}" for name, value in how.items()))
def test_generators_that_a_dataset_holds_are_keyed(read: Read, how: dict[str, Any]) -> None:
    here = read(DataLoader(Holding(), batch_size=3))
    numbers = [number for batch in here for row in batch for number in row]

    assert len(set(numbers)) == len(numbers) == 2 * 12 * 4
    assert read(DataLoader(Holding(), batch_size=3, **how)) == here
    assert read(DataLoader(Holding(), batch_size=3), epochs=[0], batch=2) == here[2:4]


def test_a_generator_that_the_collate_function_holds_is_keyed(drawing: Make, read: Read) -> None:
    def made() -> DataLoader[Any]:
        own = np.random.default_rng(8)
        return DataLoader(drawing(8), batch_size=4, collate_fn=lambda samples: own.random())

    whole = read(made())
    assert len(set(whole)) == 4
    assert read(made(), epochs=[0], batch=1) == whole[1:2]


# Per sample.


def flat(batches: list[Any]) -> list[Any]:
    return [row for batch in batches for row in batch]


def test_draws_by_sample_do_not_depend_on_the_batch_size(drawing: Make, read: Read) -> None:
    by_size = [flat(read(DataLoader(drawing(), batch_size=size, shuffle=True), per_sample=True)) for size in (1, 4, 7)]
    by_batch = [flat(read(DataLoader(drawing(), batch_size=size, shuffle=True))) for size in (1, 4)]

    assert by_size[0] == by_size[1] == by_size[2]
    assert [row[0] for row in by_batch[0]] == [row[0] for row in by_batch[1]]
    assert by_batch[0] != by_batch[1]


def test_nor_with_a_sampler_that_is_passed_over(drawing: Make, read: Read) -> None:
    def made(size: int) -> DataLoader[Any]:
        return DataLoader(drawing(), batch_size=size, sampler=list(range(0, 22, 2)))

    by_size = [flat(read(made(size), per_sample=True)) for size in (1, 4, 11)]
    assert by_size[0] == by_size[1] == by_size[2]
    assert len({row[1] for row in by_size[0]}) == 22


@pytest.mark.parametrize("ranks", [2, 4])
def test_draws_by_sample_do_not_depend_on_the_number_of_processes(drawing: Make, ranks: int) -> None:
    """Batch b of rank r of W, for a global batch of G: positions b * G + r, + W, + 2W, ..."""
    dataset, per_rank = KeyedDataset(drawing(24), None, per_sample=True), 8 // ranks

    def sample(rank: int, batch: int) -> dict[int, list[float]]:
        first = batch * 8 + rank
        indices = range(first, (batch + 1) * 8, ranks)
        place = KeyedPosition((5, 0, batch, rank), first, ranks)
        return dict(
            zip(indices, (row.tolist() for row in dataset.__getitems__(keyed_batch(indices, place))), strict=True)
        )

    alone = dataset.__getitems__(keyed_batch(range(24), KeyedPosition((5, 0, 0, 0), 0, 1)))
    shared = {index: row for rank in range(ranks) for batch in range(3) for index, row in sample(rank, batch).items()}
    assert per_rank * ranks == 8
    assert [shared[index] for index in range(24)] == [row.tolist() for row in alone]


def test_ranks_draw_apart_by_batch_too(drawing: Make) -> None:
    dataset = KeyedDataset(drawing(24), None, per_sample=False)
    one, other = (
        dataset.__getitems__(keyed_batch([3], KeyedPosition((5, 0, 0, rank), rank, 2)))[0] for rank in range(2)
    )

    assert one[0] == other[0] == 3
    assert (one[1:] != other[1:]).all()


def test_a_dataset_of_whole_batches_draws_by_its_position(drawing: Make, read: Read) -> None:
    by_batch = read(DataLoader(drawing(), batch_size=None, shuffle=True))
    workers = read(DataLoader(drawing(), batch_size=None, shuffle=True, num_workers=2))
    by_sample = read(DataLoader(drawing(), batch_size=None, shuffle=True), per_sample=True)

    assert by_batch == workers
    assert by_sample == flat(read(DataLoader(drawing(), batch_size=5, shuffle=True), per_sample=True))


# What user code in a worker sees.


class Shard(Dataset[Tensor]):
    def __init__(self) -> None:
        self.offset = self.held = self.inner = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + self.offset, self.held, self.inner])


class Stream(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.rank = self.batch_size = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.tensor([index, self.rank, self.batch_size]) for index in range(4))


def set_up_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    data: Any = info.dataset
    assert len(data) == 4
    for name, value in {"offset": 100, "held": 2, "inner": 3, "rank": 8, "batch_size": 9}.items():
        setattr(data, name, value)
    assert data.held == 2


def test_a_worker_init_fn_reaches_the_dataset(read: Read) -> None:
    (batch,) = read(DataLoader(Shard(), batch_size=4, num_workers=1, worker_init_fn=set_up_worker), epochs=[0])
    (other,) = read(DataLoader(Stream(), batch_size=4, num_workers=1, worker_init_fn=set_up_worker), epochs=[0])

    assert batch == [[100, 2, 3], [101, 2, 3], [102, 2, 3], [103, 2, 3]]
    assert other == [[0, 8, 9], [1, 8, 9], [2, 8, 9], [3, 8, 9]]


def test_a_wrapped_dataset_shows_what_is_in_it(drawing: Make, flowing: Make) -> None:
    wrapped, streaming = KeyedDataset(drawing(9), None, per_sample=False), KeyedIterable(flowing(9), None, 2, 0)
    assert (len(wrapped), wrapped.size, wrapped[3][0]) == (9, 9, 3)
    assert streaming.size == 9
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = wrapped.no_such_name
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(streaming)


def test_a_dataset_s_own_way_to_load_a_batch_is_used(read: Read) -> None:
    class Whole(Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitems__(self, indices: list[int]) -> list[int]:
            assert type(indices) is list
            return [-index for index in indices]

    assert read(DataLoader(Whole(), batch_size=3), epochs=[0]) == [[0, -1, -2], [-3, -4, -5]]


# The training's stream.


def kinds(drawing: Make, flowing: Make, collate: Any) -> dict[str, Any]:
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 22, 22)
    return {
        "map": DataLoader(drawing(), 4, shuffle=True, collate_fn=collate),
        "map, 2 workers": DataLoader(drawing(), 4, shuffle=True, collate_fn=collate, num_workers=2),
        "sampler": DataLoader(drawing(), 4, sampler=sampler),
        "sampler, 2 workers": DataLoader(drawing(), 4, sampler=sampler, num_workers=2),
        "iterable": DataLoader(flowing(), 4, collate_fn=collate),
        "iterable, 2 workers": DataLoader(flowing(), 4, num_workers=2),
        "any": Generating(),
    }


class Generating:
    """An iterable of batches that draws in this process."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(6):
            yield random.random() + random.gauss(0, 1) + np.random.randn() + torch.rand(1).item()


class Uniform(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1)


class WithNoise(DataLoader[Tensor]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch, torch.rand(2)


def test_the_code_of_a_loader_draws_other_numbers_than_its_dataset(reading: Any) -> None:
    source = source_of(WithNoise(Uniform(), batch_size=2, num_workers=1))
    batches = list(reading(source, 0, 0))
    source.close()
    drawn = [number for batch, noise in batches for number in (*batch.flatten().tolist(), *noise.tolist())]
    assert len(drawn) == len(set(drawn)) == 16


KINDS = ["map", "map, 2 workers", "sampler", "sampler, 2 workers", "iterable", "iterable, 2 workers", "any"]


@pytest.mark.parametrize("kind", KINDS)
def test_loading_leaves_the_stream_alone(
    kind: str, drawing: Make, flowing: Make, collate: Any, reading: Any, training_stream: Any
) -> None:
    source = source_of(kinds(drawing, flowing, collate)[kind])
    np.random.randn()  # the second normal number of a pair is in hand
    before = training_stream()
    batches, seen = reading(source, 0, 2), []
    assert training_stream() == before
    for batch in batches:
        seen.append(batch)
        assert training_stream() == before
    source.close()

    assert len(seen) == 4
    assert training_stream() == before


class Failing(Dataset[float]):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        if index == 2:
            random.random()
            np.random.rand()
            torch.rand(1)
            raise self.error
        return 0.5


def test_a_dataset_that_raises_leaves_the_stream_alone(reading: Any, training_stream: Any) -> None:
    source = source_of(DataLoader(Failing(ArithmeticError("broken"))))
    before, threads = training_stream(), torch.get_num_threads()
    batches = reading(source)
    with pytest.raises(ArithmeticError, match="broken"):
        list(batches)

    assert training_stream() == before
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [1, None])
def test_a_stop_iteration_of_a_dataset_is_an_error(read: Read, workers: int, batch_size: int | None) -> None:
    """torch takes it for the end of the epoch."""
    with pytest.raises(RuntimeError, match="The dataset raised StopIteration"):
        read(DataLoader(Failing(StopIteration()), batch_size=batch_size, num_workers=workers))


def test_a_training_does_not_notice_how_its_data_are_loaded(drawing: Make, fit: Make) -> None:
    here, there = (fit(DataLoader(drawing(), 4, shuffle=True, num_workers=workers)) for workers in (0, 2))

    assert here.batches == there.batches
    assert here.losses == there.losses
    assert here.weights == there.weights


class Sometimes(Dataset[Any]):
    """Draws for some samples; counts how often each is loaded."""

    def __init__(self, draws_at: set[int]) -> None:
        self.draws_at, self.loaded = draws_at, list[int]()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        if index not in self.draws_at:
            return torch.tensor([float(index)])
        drawn = random.gauss(0, 1) + np.random.rand() + np.random.default_rng().random()
        return torch.tensor([index + drawn]) + torch.rand(1)


@pytest.mark.parametrize("draws_at", [set(), {0}, {17}, {5, 17, 30}, set(range(40))], ids=len)
def test_a_batch_that_draws_is_loaded_with_its_key(draws_at: set[int], read: Read, training_stream: Any) -> None:
    expected = read(DataLoader(Sometimes(draws_at), batch_size=4, num_workers=1))
    dataset, before = Sometimes(draws_at), training_stream()

    assert read(DataLoader(dataset, batch_size=4)) == expected
    assert training_stream() == before
    first = min(draws_at, default=0) // 4 * 4
    twice = list(range(first, first + 4)) if first else []  # the first batch is seeded in any case
    assert sorted(dataset.loaded) == sorted([*range(40), *range(40), *twice])  # two epochs


def restore_python() -> float:
    state = random.getstate()
    drawn = random.random()
    random.setstate(state)
    return drawn


def restore_torch() -> float:
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


READERS: list[Callable[[], float]] = [
    restore_python,
    restore_torch,
    lambda: float(torch.initial_seed() % 1000),
    lambda: float(np.random.get_state()[1][0]),  # type: ignore[index]  # a tuple or a dict
]


class ReadsState(Dataset[float]):
    """Reads the state of a generator without changing it."""

    def __init__(self, read_state: Callable[[], float]) -> None:
        self.read_state = read_state

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return self.read_state()


@pytest.mark.parametrize("read_state", READERS, ids=["getstate", "fork_rng", "initial_seed", "get_state"])
def test_a_state_that_is_read_without_a_draw_is_keyed(read_state: Callable[[], float], read: Read) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(ReadsState(read_state), batch_size=2)

    whole = read(loader(), epochs=[0])
    assert len({value for batch in whole for value in batch}) == 4
    assert read(loader(), epochs=[0], batch=2) == whole[2:]


class CachesRarely(Dataset[Tensor]):
    """Keeps what it draws for one sample."""

    def __init__(self) -> None:
        self.cache: dict[int, float] = {}
        self.loaded = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        self.loaded += 1
        drawn = self.cache.setdefault(index, random.random()) if index == 5 else 0.0
        return torch.tensor([index + drawn] * 7)


def test_a_cache_keeps_values_that_are_drawn_with_a_key(fit: Any) -> None:
    here, there = (fit(DataLoader(CachesRarely(), 2, num_workers=workers)) for workers in (0, 2))
    assert here.batches[:4] == there.batches[:4]  # the first epoch
    assert here.batches[2][1][0] > 5
