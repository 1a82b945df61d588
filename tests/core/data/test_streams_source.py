"""Several streams as one source: which batch is of what, from every position, in every mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal

import pytest
import torch
from heliograph import Streams
from heliograph.core.data.source import Reading, Source
from heliograph.core.data.source_choice import source_of
from heliograph.core.data.streams import MODES, Mode
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

Make = Callable[..., Any]
Read = Callable[..., list[Any]]

LONG, SHORT = [0, 1, 2, 3, 4], [10, 11]
LITERAL: dict[str, tuple[Any, list[Any]]] = {
    "cycle": ({}, [(0, 10), (1, 11), (2, 10), (3, 11), (4, 10)]),
    "a given length": ({"length": 7}, [(0, 10), (1, 11), (2, 10), (3, 11), (4, 10), (0, 11), (1, 10)]),
    "min": ({"mode": "min"}, [(0, 10), (1, 11)]),
    "max": ({"mode": "max"}, [(0, 10), (1, 11), (2, None), (3, None), (4, None)]),
}


@pytest.mark.parametrize(("options", "expected"), LITERAL.values(), ids=LITERAL)
def test_what_each_batch_is_of(options: Any, expected: list[Any], read: Read) -> None:
    streams = Streams({"long": LONG, "short": SHORT}, **options)
    assert [tuple(batch.values()) for batch in read(streams, epochs=[0])] == expected
    assert [list(batch) for batch in read(streams, epochs=[0])] == [["long", "short"]] * len(expected)


def test_weighted_draws_one_stream_for_each_batch(read: Read) -> None:
    streams = Streams({"a": [0] * 3, "b": [1] * 5}, mode="weighted", weights={"a": 3, "b": 1}, length=4000)
    first, second = read(streams, epochs=[0]), read(streams, epochs=[1])

    assert 2850 < Counter(first)[0] < 3150
    assert len(first) == len(second) == 4000
    assert first != second
    assert read(streams, epochs=[0]) == first
    again = Streams({"b": [1] * 5, "a": [0] * 3}, mode="weighted", weights={"b": 1, "a": 3}, length=4000)
    assert read(again, epochs=[0]) == first
    assert read(streams, epochs=[0], seed=6) != first


def test_without_weights_a_stream_is_drawn_as_often_as_it_is_long(read: Read) -> None:
    found = read(Streams({"a": [0] * 300, "b": [1] * 900}, mode="weighted"), epochs=[0])
    assert len(found) == 1200
    assert 840 < Counter(found)[1] < 960


def test_each_stream_comes_in_its_own_order(drawing: Make, read: Read) -> None:
    def made(**options: Any) -> Streams:
        loaders = {name: DataLoader(drawing(6), 2, shuffle=True) for name in ("one", "two")}
        return Streams(loaders, **options)

    batches = read(made(length=6), epochs=[0, 1])
    of_stream = {name: [indices(batch[name]) for batch in batches] for name in ("one", "two")}
    passes = {name: list(zip(*[iter(each)] * 3, strict=True)) for name, each in of_stream.items()}
    for each in chain(*passes.values()):
        assert sorted(chain(*each)) == list(range(6))
    assert len(set(chain(*passes.values()))) == 8

    mixed = read(made(mode="weighted", length=12), epochs=[0])
    source: Any = source_of(made(mode="weighted", length=12))
    list(source.open(reading(0, 0)))
    chosen = [source.chosen(number) for number in range(12)]
    for name in ("one", "two"):
        own = [indices(batch) for batch, of in zip(mixed, chosen, strict=True) if of == name]
        assert own[:3] == list(passes[name][0])


def indices(batch: Tensor) -> tuple[int, ...]:
    return tuple(int(row[0]) for row in batch)


def reading(epoch: int, batch: int, **options: Any) -> Reading:
    return Reading(5, epoch, batch, True, lambda done, batches: None, **options)


def test_a_position_is_found_without_reading(drawing: Make) -> None:
    for mode in MODES:
        data = {"long": drawing(60), "short": drawing(7)}
        loaders = {name: DataLoader(each, 2, shuffle=True) for name, each in data.items()}
        whole = list(source_of(Streams(loaders, mode=mode)).open(reading(2, 0)))
        for each in data.values():
            each.asked.clear()
        position = len(whole) - 1
        (last,) = source_of(Streams(loaders, mode=mode)).open(reading(2, position))
        assert flat(last) == flat(whole[position])
        assert sum(len(each.asked) for each in data.values()) <= 4


def flat(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: flat(part) for name, part in batch.items()}
    return batch.tolist() if isinstance(batch, Tensor) else batch


class Flow(IterableDataset[Tensor]):
    """Counts, and may have a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.size):
            yield torch.tensor([index, torch.rand(()).item()])


class SizedFlow(Flow):
    def __len__(self) -> int:
        return self.size


class Samples(Dataset[Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item()])


Kind = Literal["list", "map", "flow", "sized flow", "opaque", "stateful"]
SIZED: list[Kind] = ["list", "map", "sized flow", "stateful"]


def made_of(kind: Kind, size: int) -> Any:
    if kind == "list":
        return list(torch.arange(size))
    if kind == "map":
        return DataLoader(Samples(size), 2, shuffle=True)
    if kind == "opaque":
        return dict.fromkeys(torch.arange(size).tolist()).keys()
    if kind == "stateful":
        return StatefulDataLoader(Samples(size), 2)
    return DataLoader(SizedFlow(size) if kind == "sized flow" else Flow(size), 2)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[dict[str, tuple[Kind, int]], dict[str, Any]]:
    mode: Mode = draw(st.sampled_from(MODES))
    length = draw(st.none() | st.integers(1, 12)) if mode in ("cycle", "weighted") else None
    needs_length = mode in ("cycle", "weighted") and length is None
    kinds: list[Kind] = SIZED if needs_length else [*SIZED, "flow", "opaque"]
    kind = st.tuples(st.sampled_from(kinds), st.integers(1, 7))
    streams = draw(st.dictionaries(st.sampled_from("abc"), kind, min_size=1))
    weights = {"weights": dict.fromkeys(streams, 1.0)} if mode == "weighted" and length is not None else {}
    return streams, {"mode": mode, "length": length, **weights}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata with torch 2.13
@settings(deadline=None, max_examples=150, derandomize=True)
@given(mixtures(), st.data())
def test_from_any_position_the_rest_is_the_same(mixture: Any, data: st.DataObject) -> None:
    kinds, options = mixture

    def source() -> Source:
        return source_of(Streams({name: made_of(*each) for name, each in kinds.items()}, **options))

    whole = source()
    first, second = (list(whole.open(reading(epoch, 0))) for epoch in (0, 1))
    assert first
    if whole.length is not None:
        assert len(first) == len(second) == whole.length
    position = data.draw(st.integers(0, len(second)))

    cut = source()
    list(cut.open(reading(0, 0)))
    ahead = whole.length is None and data.draw(st.booleans())
    batches = cut.open(reading(1, 0, ahead=ahead))
    before = [next(batches) for _ in range(position)]
    if ahead and position:
        next(batches, None)  # as the loop does
    assert list(map(flat, before)) == list(map(flat, second[:position]))
    state = cut.state_dict(position)

    resumed = source()
    resumed.load_state_dict(state)
    if position:
        assert resumed.state_dict(position) == state
    rest = list(resumed.open(reading(1, position)))
    assert list(map(flat, rest)) == list(map(flat, second[position:]))
    if whole.length is not None:
        following = list(resumed.open(reading(2, 0)))
        assert list(map(flat, following)) == list(map(flat, whole.open(reading(2, 0))))


class Epochs(IterableDataset[int]):
    """Yields the epoch that it is in."""

    epoch = -1

    def __init__(self, size: int) -> None:
        self.size = size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * self.size)


def test_every_pass_is_an_epoch_of_the_stream(read: Read) -> None:
    def made(**options: Any) -> Streams:
        return Streams({"a": DataLoader(Epochs(5), None), "b": DataLoader(Epochs(2), None)}, **options)

    assert [tuple(batch.values()) for batch in read(made(), epochs=[0, 1])] == [
        *[(0, 0), (0, 0), (0, 1), (0, 1), (0, 2)],
        *[(1, 3), (1, 3), (1, 4), (1, 4), (1, 5)],
    ]
    assert [tuple(batch.values()) for batch in read(made(mode="min"), epochs=[0, 1])] == [(0, 0)] * 2 + [(1, 1)] * 2
    assert read(made(), epochs=[1], batch=3) == [{"a": 1, "b": 4}, {"a": 1, "b": 5}]


def test_a_stream_without_a_length_says_where_it_was(read: Read) -> None:
    source = source_of(Streams({"a": DataLoader(Flow(3), None), "b": [7, 8]}, length=5))
    batches = source.open(reading(0, 0))
    assert [flat(next(batches))["a"][0] for _ in range(4)] == [0, 1, 2, 0]
    assert source.state_dict(4)["places"] == {"a": [1, 1, False], "b": [2, 0, False]}
    assert source.certainty() == ("replayed", ())


def once() -> Iterator[int]:
    return iter([1, 2])


@pytest.mark.parametrize("mode", MODES)
def test_a_generator_is_read_once(mode: Mode) -> None:
    options: Any = {"length": 5} if mode in ("cycle", "weighted") else {}
    source = source_of(Streams({"a": once(), "b": [3, 4, 5, 6]}, mode=mode, **options, **weighted(mode, "ab")))
    if mode in ("cycle", "weighted"):
        with pytest.raises(ValueError, match="train stream 'a' yielded"):
            list(chain.from_iterable(source.open(reading(epoch, 0)) for epoch in range(9)))
        return
    first = list(source.open(reading(0, 0)))
    assert [batch["a"] for batch in first] == ([1, 2] if mode == "min" else [1, 2, None, None])
    if mode == "min":
        assert list(source.open(reading(1, 0))) == []
    else:
        with pytest.raises(ValueError, match="train stream 'a' yielded"):
            list(source.open(reading(1, 0)))


def weighted(mode: str, names: Iterable[str]) -> dict[str, Any]:
    return {"weights": dict.fromkeys(names, 1)} if mode == "weighted" else {}


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_that_is_empty_is_named(mode: Mode) -> None:
    options: Any = {"length": 5} if mode in ("cycle", "weighted") else {}
    source = source_of(Streams({"a": [1] * 9, "b": DataLoader(Flow(0))}, mode=mode, **options, **weighted(mode, "ab")))
    with pytest.raises(ValueError, match=r"'b' yielded no batch\."):
        list(source.open(reading(0, 0)))


class Liar(Flow):
    def __len__(self) -> int:
        return self.size + 1


def test_a_stream_that_ends_before_its_length_is_named() -> None:
    source = source_of(Streams({"a": [1] * 9, "b": DataLoader(Liar(3), None)}))
    with pytest.raises(ValueError, match="'b' ended after 3"):
        list(source.open(reading(0, 0)))


def test_what_is_read_again_is_compared_with_the_streams_that_were() -> None:
    """The other streams' parts are not read again."""
    compared: list[Any] = []
    for mode, position, expected in (("cycle", 3, {"b": 0}), ("cycle", 2, {}), ("max", 2, {}), ("min", 1, {"b": 0})):
        source = source_of(Streams({"a": [7] * 4, "b": DataLoader(Epochs(2), None)}, mode=mode))  # type: ignore[arg-type]
        batches = source.open(reading(0, 0))
        *_, last = (next(batches) for _ in range(position))
        parts = source.compared(last, position)
        assert list(parts) == list(expected)
        compared.clear()
        source.open(reading(0, position, check=compared.append))
        assert compared == ([parts] if parts else [])
