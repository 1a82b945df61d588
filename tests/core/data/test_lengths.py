"""Batches of similar lengths and of a number of tokens: laws of their order, and exact resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.core.data.sizes import Share
from heliograph.core.data.source import Reading
from heliograph.core.data.source_choice import source_of
from heliograph.tests.kit import linear_classifier, sgd
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=60)


class Texts(Dataset[tuple[torch.Tensor, int]]):
    """Sequences of ones, of given lengths; the target is the number of the text."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(self.lengths[index]), index


def pad(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts [samples, longest] and their numbers [samples]."""
    texts, numbers = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.tensor(numbers)


@settings(max_examples=60, deadline=None, database=None)
@given(lengths=LENGTHS, size=st.integers(1, 6), batches=st.integers(1, 4), seed=st.integers(0, 9), data=st.data())
def test_groups_hold_every_sample_once_and_are_sorted(
    lengths: list[int], size: int, batches: int, seed: int, data: st.DataObject
) -> None:
    sampler = h.LengthGroupedSampler(lengths, size, batches=batches)
    order = list(sampler.indices(seed, 2, 0))
    assert sorted(order) == list(range(len(lengths)))
    for first in range(0, len(order), size * batches):
        group = [lengths[index] for index in order[first : first + size * batches]]
        assert group == sorted(group, reverse=True)
    start = data.draw(st.integers(0, len(lengths)))
    assert list(sampler.indices(seed, 2, start)) == order[start:]


@settings(max_examples=60, deadline=None, database=None)
@given(
    lengths=LENGTHS,
    tokens=st.integers(24, 90),
    multiple=st.sampled_from([1, 4, 8]),
    most=st.sampled_from([None, 1, 3]),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_batches_hold_every_sample_once_and_keep_to_the_budget(
    lengths: list[int], tokens: int, multiple: int, most: int | None, shuffle: bool, data: st.DataObject
) -> None:
    sampler = h.TokenBudgetBatchSampler(lengths, tokens, multiple_of=multiple, max_samples=most, shuffle=shuffle)
    for epoch in range(3):
        batches = list(sampler.indices(5, epoch, 0))
        assert len(batches) == len(sampler)
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        for batch in batches:
            longest = max(-(-lengths[index] // multiple) * multiple for index in batch)
            assert longest * len(batch) <= tokens
            assert len(batch) <= (most or len(lengths))
        start = data.draw(st.integers(0, len(sampler)))
        assert list(sampler.indices(5, epoch, start)) == batches[start:]


def test_little_is_padded() -> None:
    lengths = np.random.RandomState(0).randint(1, 500, 2000)

    def padded(order: list[int]) -> int:
        return sum(max(lengths[order[at : at + 16]]) * 16 for at in range(0, 2000, 16))

    grouped = padded(list(h.LengthGroupedSampler(lengths, 16).indices(0, 0, 0)))
    shuffled = padded(list(h.RandomSampler(2000).indices(0, 0, 0)))
    assert lengths.sum() < grouped < 1.04 * lengths.sum() < 1.8 * lengths.sum() < shuffled


def test_epochs_differ_in_the_order_and_in_who_meets_whom() -> None:
    lengths = [1, 1, 1, 1, 2, 2, 2, 2] * 3
    sampler = h.TokenBudgetBatchSampler(lengths, 4)
    first, second = (list(sampler.indices(0, epoch, 0)) for epoch in (0, 1))
    assert first != second
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
    assert list(sampler.indices(0, 1, 0)) == second


def test_a_seed_of_its_own_goes_before_that_of_the_run() -> None:
    for make in (
        lambda seed: h.LengthGroupedSampler(range(1, 40), 4, batches=2, seed=seed),
        lambda seed: h.TokenBudgetBatchSampler(range(1, 40), 40, seed=seed),
    ):
        assert [*make(3).indices(1, 0, 0)] == [*make(3).indices(2, 0, 0)] == [*make(None).indices(3, 0, 0)]


def test_a_plain_loader_reads_them_too() -> None:
    texts = Texts([3, 1, 2, 3, 1])
    sampler = h.TokenBudgetBatchSampler(texts.lengths, 6)
    sampler.set_epoch(1)
    read = [numbers.tolist() for _, numbers in DataLoader(texts, batch_sampler=sampler, collate_fn=pad)]
    assert read == list(sampler.indices(0, 1, 0))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: h.LengthGroupedSampler([], 4), r"an integer for each sample.*shape \[0\]"),
        (lambda: h.LengthGroupedSampler([[1, 2]], 4), r"shape \[1, 2\]"),
        (lambda: h.LengthGroupedSampler([1.5], 4), "an integer for each sample, got float64"),
        (lambda: h.LengthGroupedSampler([3, -1], 4), "at least 0; sample 1 has the length -1"),
        (lambda: h.LengthGroupedSampler([3], 0), "batch_size"),
        (lambda: h.TokenBudgetBatchSampler([3, 9], 8), "Sample 1 has 9.*8"),
        (lambda: h.TokenBudgetBatchSampler([7], 7, multiple_of=8), "a multiple of 8"),
        (lambda: h.TokenBudgetBatchSampler([0], 7), "sample 0 .*length 0"),
        (lambda: h.TokenBudgetBatchSampler([1], 7, max_samples=0), "max_samples"),
        (lambda: h.TokenBudgetBatchSampler([1], 7, shuffle=1), "shuffle"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        make()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_batches_of_one_order(ranks: int) -> None:
    texts = Texts([1 + index % 7 for index in range(40)])
    sampler = h.TokenBudgetBatchSampler(texts.lengths, 14)
    whole = list(sampler.indices(5, 1, 0))
    shares = [
        source_of(DataLoader(texts, batch_sampler=sampler, collate_fn=pad), Share(rank, ranks)) for rank in range(ranks)
    ]
    read = [
        [numbers.tolist() for _, numbers in each.open(Reading(5, 1, 0, True, lambda done, total: None))]
        for each in shares
    ]
    assert {len(each) for each in read} == {-(-len(whole) // ranks)}
    in_turn = [batch for together in zip(*read, strict=True) for batch in together]
    assert in_turn == [*whole, *whole[: len(in_turn) - len(whole)]]


def params(kind: str, texts: Texts, workers: int) -> h.LoaderParams:
    more: h.LoaderParams = {"num_workers": workers, "collate_fn": pad}
    if kind == "grouped":
        return {"batch_size": 4, "sampler": h.LengthGroupedSampler(texts.lengths, 4, batches=2), **more}
    return {"batch_sampler": h.TokenBudgetBatchSampler(texts.lengths, 16), **more}


class Sums(h.Task):
    """Learns the number of a text from its sum; keeps which texts it was given."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.read: list[list[int]] = []

    def training_step(self, run: h.Run, batch: Any) -> torch.Tensor:
        texts, numbers = batch
        self.read.append(numbers.tolist())
        noise = torch.rand(())  # of the training's own stream
        return nn.functional.mse_loss(self.model(texts.sum(1, keepdim=True)), numbers[:, None] * noise)


@pytest.mark.sample(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["grouped", "budget"])
@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, kind: str, workers: int, cut: int) -> None:
    texts = Texts([1 + (7 * index) % 8 for index in range(24)])

    def train(folder: Path, stop: int | None) -> tuple[Sums, h.RunResult]:
        task = Sums()
        saving = [h.SaveSchedule(h.Every(steps=1)), h.Checkpoint(folder, resume="auto")]
        trainer = h.Trainer([h.RNGCapture(), *saving], device="cpu")
        if stop is not None:
            trainer.bus.on(
                h.BatchEnd, lambda run, event: run.control.stop("enough") if run.progress.steps == stop else None
            )
        return task, trainer.fit(task, texts, loader_params=params(kind, texts, workers), optimizer=sgd(0.01), epochs=2)

    whole, _ = train(tmp_path / "whole", None)
    first, _ = train(tmp_path / "cut", cut)
    second, result = train(tmp_path / "cut", None)
    assert result.resume is not None
    assert result.resume.reasons == ()
    assert first.read == whole.read[:cut]
    assert second.read == whole.read  # the attribute of a task is restored
    assert torch.equal(second.model.weight, whole.model.weight)


def test_a_position_among_other_lengths_is_refused(tmp_path: Path) -> None:
    texts, others = Texts([1, 2, 3, 4] * 6), Texts([4, 3, 2, 1] * 6)
    for chosen, raises in ((texts, None), (others, ValueError)):
        saving = [h.SaveSchedule(h.Every(steps=1)), h.Checkpoint(tmp_path, resume="auto")]
        trainer = h.Trainer([h.RNGCapture(), *saving], device="cpu")
        how: dict[str, Any] = {"loader_params": params("budget", chosen, 0), "optimizer": sgd(0.01), "steps": 2}
        if raises is None:
            trainer.fit(Sums(), chosen, **how)
        else:
            with pytest.raises(raises, match="token-budget"):
                trainer.fit(Sums(), chosen, **how)


def test_a_batch_sampler_goes_with_nothing_that_it_decides() -> None:
    texts = Texts([1, 2])
    sampler = h.TokenBudgetBatchSampler(texts.lengths, 4)
    trainer = h.Trainer(device="cpu")
    with pytest.raises(ValueError, match="not both: the sampler"):
        trainer.fit(
            Sums(),
            texts,
            loader_params={"batch_sampler": sampler, "batch_size": 2, "shuffle": True},
            optimizer=sgd(),
            epochs=1,
        )
    with pytest.raises(ValueError, match="validation data as batches"):
        trainer = h.Trainer([h.ValidationSchedule(h.Every(epochs=1))], device="cpu")
        trainer.fit(
            linear_classifier(),
            texts,
            loader_params={"batch_sampler": sampler},
            validation=cast(Any, texts),
            optimizer=sgd(),
            epochs=1,
        )
