from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.core.data import last_batch
from heliograph.core.data.last_batch import COMPLETE, LastBatch
from heliograph.core.data.training_data import CHANGED_BATCH
from heliograph.events import Progress
from heliograph.tests import kit
from heliograph.tests.kit import fit, saving, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


@dataclass(slots=True)
class Slotted:
    inputs: Tensor


class Graph:
    """As the batches of some libraries: an object with attributes."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def batch_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4, 3, generator=generator)
    return {
        "inputs": inputs,
        "array": inputs.numpy().astype(np.float16),
        "pair": Pair(inputs[0], inputs[1].to(torch.bfloat16)),
        "more": UserDict(graph=Graph(inputs[2])),
        "texts": ["a"] * 3,
        "weight": 0.5,
    }


def digest(batch: Any) -> bytes | None:
    return LastBatch().read_again(1, batch)


def test_equal_batches_have_equal_digests() -> None:
    assert digest(batch_of(0)) == digest(batch_of(0)) != digest(batch_of(1))


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": torch.zeros(4, 3)},
        {"array": np.zeros((4, 3), np.float16)},
        {"array": np.zeros((3, 4), np.float16)},
        {"pair": Pair(torch.zeros(3), torch.zeros(3))},
        {"more": UserDict(graph=Graph(torch.zeros(3)))},
        {"texts": ["a", "a", "b"]},
        {"weight": 0.25},
        {"weight": 1},
        {"new": None},
    ],
)
def test_every_part_of_a_batch_counts(change: dict[str, Any]) -> None:
    assert digest(batch_of(0)) != digest({**batch_of(0), **change})


def test_of_a_large_batch_a_sample_counts_and_the_size() -> None:
    large = torch.arange(COMPLETE, dtype=torch.float32)
    assert digest(large) == digest(large.clone()) != digest(large[:-1])
    assert digest(large) != digest(large + 1)
    assert len(last_batch._sample(large, large.nbytes // last_batch.SAMPLE)) == last_batch.SAMPLE


def test_signed_zeros_and_numbers_that_are_none_are_distinguished_by_their_bits() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([torch.nan])) == digest(torch.tensor([torch.nan]))


def test_a_sparse_tensor_counts() -> None:
    assert digest(torch.eye(2).to_sparse()) == digest(torch.eye(2).to_sparse()) != digest(torch.ones(2, 2).to_sparse())


def test_slots_of_a_batch_count() -> None:
    assert digest(Slotted(torch.zeros(2))) == digest(Slotted(torch.zeros(2))) != digest(Slotted(torch.ones(2)))


def test_what_holds_itself_has_a_digest() -> None:
    graph = Graph(torch.zeros(1))
    graph.again = graph  # type: ignore[attr-defined]
    assert digest(graph) == digest(graph)


def followed(progress: Progress) -> tuple[LastBatch, Iterator[Any]]:
    last = LastBatch()
    return last, last.follow(iter([batch_of(seed) for seed in range(5)]), progress)


def test_the_batch_in_hand_is_the_one_that_is_kept() -> None:
    progress = Progress()
    last, batches = followed(progress)
    for number in range(1, 6):
        next(batches)
        progress.batch = number
        assert last.digest(number) == digest(batch_of(number - 1))
        assert last.digest(number - 1) is None
        assert len(last._batches) == 1


def test_reading_ahead_changes_nothing() -> None:
    progress = Progress()
    last, batches = followed(progress)
    next(batches)
    next(batches)
    progress.batch = 1
    assert last.digest(1) == digest(batch_of(0))
    next(batches)
    assert [batch.number for batch in last._batches] == [2, 3]


def test_what_the_task_takes_out_is_still_there() -> None:
    last, batches = followed(Progress())
    batch = next(batches)
    batch.pop("texts")
    batch["more"].clear()
    assert last.digest(1) == digest(batch_of(0))


def test_a_batch_that_was_changed_in_place_is_not_compared() -> None:
    last, batches = followed(Progress())
    next(batches)["inputs"].mul_(2)
    assert last.digest(1) is None


# In a run.


class Rollout:
    """Batches that the model makes, or that the loader draws without a key."""

    def __init__(self, model: nn.Linear, *, by_model: bool) -> None:
        self.model, self.by_model = model, by_model

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(10):
            inputs = torch.full((2, 3), float(number))
            if self.by_model:
                with torch.no_grad():
                    inputs = inputs + self.model(inputs).mean()
            yield {"inputs": inputs, "targets": torch.zeros(2, 1)}


class Popping(h.Supervised):
    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.model(batch["inputs"]), batch.pop("targets"))


def train(folder: Path, steps: int, make: Any, resume: str | None = "auto", *plugins: Any) -> h.RunResult:
    torch.manual_seed(0)
    task = Popping(nn.Linear(3, 1), nn.functional.mse_loss)
    plugins = (*saving(folder, h.Every(steps=4), resume=resume), *plugins)
    return fit(*plugins, task=task, train=make(task.model), optimizer=sgd(0.01), steps=steps)


def compared(result: h.RunResult) -> tuple[str, tuple[str, ...]]:
    assert result.resume is not None
    return result.resume.position, result.resume.reasons


def test_a_loader_that_gives_other_batches_the_second_time_is_found_out(tmp_path: Path) -> None:
    """Data that the model makes are read again with other weights."""
    for by_model, reasons in ((False, ()), (True, (CHANGED_BATCH,))):
        make = lambda model, by_model=by_model: Rollout(model, by_model=by_model)  # noqa: E731
        folder = tmp_path / str(by_model)
        train(folder, 4, make)
        assert compared(train(folder, 6, make)) == ("replayed", reasons)


def test_a_save_before_the_first_new_batch_keeps_what_is_known(tmp_path: Path) -> None:
    class SaveAtOnce(h.Plugin):
        asks = ("save",)

        @h.on(h.EpochStart)
        def save(self, run: h.Run, event: h.EpochStart) -> None:
            if event.resumed:
                run.control.request_save("at once")

    make = lambda model: Rollout(model, by_model=True)  # noqa: E731
    train(tmp_path, 4, make)
    train(tmp_path, 4, make, "auto", SaveAtOnce())
    assert compared(train(tmp_path, 6, make)) == ("replayed", (CHANGED_BATCH,))


class Stream(IterableDataset[Tensor]):
    """Draws what no key reaches, or counts."""

    def __init__(self, *, counts: bool) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        entropy = torch.Generator()
        entropy.seed()
        for number in range(40):
            inputs = torch.full((3,), float(number)) if self.counts else torch.randn(3, generator=entropy)
            yield {"inputs": inputs, "targets": torch.zeros(1)}


def test_an_iterable_dataset_is_compared_too(tmp_path: Path) -> None:
    for counts, reasons in ((True, ()), (False, (CHANGED_BATCH,))):
        make = lambda model, counts=counts: DataLoader(Stream(counts=counts), batch_size=4)  # noqa: E731
        folder = tmp_path / str(counts)
        train(folder, 4, make)
        assert compared(train(folder, 6, make)) == ("replayed", reasons)


def test_what_is_sought_is_not_compared(tmp_path: Path) -> None:
    data = [{"inputs": torch.full((3,), float(number)), "targets": torch.zeros(1)} for number in range(40)]
    make: Any = lambda model: DataLoader(data, batch_size=4, shuffle=True)  # type: ignore[arg-type]  # noqa: E731
    result = train(tmp_path, 4, make)
    assert result.last_checkpoint is not None
    assert torch.load(result.last_checkpoint, weights_only=True)["data"]["last_batch"] is None
    assert compared(train(tmp_path, 6, make)) == ("seeked", ())


class Look(h.Plugin):
    affects_training = False
    follows = False

    @h.on(h.BatchEnd)
    def look(self, run: h.Run, event: h.BatchEnd) -> None:
        self.follows = "last" in vars(run.data)


class Again:
    """Yields its batches again in each epoch; it has no position."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.mark.parametrize("saves", [False, True])
def test_batches_are_followed_only_if_a_plugin_saves(saves: bool, tmp_path: Path) -> None:
    look = Look()
    plugins = [look, *([h.Checkpoint(tmp_path, every=h.Every(epochs=1))] if saves else [])]
    data = Again(kit.class_batches(3))
    h.Trainer(plugins, device="cpu").fit(kit.linear_classifier(), data, optimizer=kit.sgd(), epochs=1)
    assert look.follows is saves


class Counting:
    """Yields other batches in each pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.passes += 1
        for number in range(3):
            yield {"inputs": torch.full((2, 3), float(number * self.passes)), "targets": torch.zeros(2, 1)}


def test_a_number_that_an_iterable_counts_is_compared(tmp_path: Path) -> None:
    train(tmp_path, 6, lambda model: Counting())
    position, reasons = compared(train(tmp_path, 8, lambda model: Counting()))
    assert position == "replayed"
    assert "loader.passes was 2 and is 1: the training changed it" in reasons
