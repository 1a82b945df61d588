"""Validations of 1,000 tiny batches within a training, beside hand-written ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from time import thread_time
from typing import Any

import heliograph as h
import torch
from heliograph.packages.tests.benchmarks.harness import SIZE, Batch, Train, Turns, batches_of, sgd, tiny_model
from heliograph.packages.tests.benchmarks.lean import CONTROL, HAND, OWN_TASK, SUPERVISED, OwnTask
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCHES = 1_000
ROUNDS = 24
WARM_UP = 1  # round
KEYED = "heliograph, with RNGCapture"
Validation = Iterable[Batch]


class Alternating(Turns):
    """A training loader of one batch: a turn is its step and the validation after it, in processor time."""

    clock = staticmethod(thread_time)

    def __len__(self) -> int:
        return 1


class OwnSteps(OwnTask):
    """A task as short as can be."""

    def validation_step(self, run: h.Run, batch: Any) -> Tensor:
        """Return the loss."""
        inputs, targets = batch
        return mse_loss(self.model(inputs), targets)


def by_hand(validation: Validation) -> Train:
    """Return a training that validates as one does without a framework who does not wait for the device."""

    def train(loader: Turns, epochs: int) -> None:
        model = tiny_model()
        optimizer = sgd(model.parameters())
        for _ in range(epochs):
            for inputs, targets in loader:
                mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch has none here
                optimizer.step()
                optimizer.zero_grad()
            validate(model, validation)

    return train


@torch.no_grad()
def validate(model: nn.Module, validation: Validation) -> float:
    """Return the mean loss over the samples."""
    model.eval()
    total, samples = torch.zeros(()), 0
    for inputs, targets in validation:
        size = inputs.shape[0]
        total += mse_loss(model(inputs), targets) * size
        samples += size
    model.train()
    return total.item() / samples


def fit(validation: Validation, *plugins: h.Plugin, own: bool = False) -> Train:
    """Return a training that validates after each epoch."""

    def train(loader: Turns, epochs: int) -> None:
        task = OwnSteps(tiny_model()) if own else h.Supervised(tiny_model(), mse_loss)
        every = h.ValidationSchedule(h.Every(epochs=1))
        h.Trainer([every, *plugins], device="cpu").fit(
            task, loader, validation=validation, optimizer=sgd, epochs=epochs
        )

    return train


def per_batch(seed: int) -> dict[str, list[float]]:
    """Return the microseconds of a batch of each validation; the batches are prebuilt."""
    batches = batches_of(BATCHES)
    variants = {HAND: by_hand(batches), CONTROL: by_hand(batches), SUPERVISED: fit(batches)}
    return take_turns({**variants, OWN_TASK: fit(batches, own=True)}, seed)


def per_loaded_batch(seed: int) -> dict[str, list[float]]:
    """Return the same over a `DataLoader`, whose draws are keyed where a `RNGCapture` is there."""

    def loader() -> DataLoader[Any]:
        return DataLoader(dataset(), batch_size=SIZE)

    variants = {HAND: by_hand(loader()), CONTROL: by_hand(loader()), SUPERVISED: fit(loader())}
    return take_turns({**variants, KEYED: fit(loader(), h.RNGCapture(0))}, seed)


def dataset() -> Dataset[Any]:
    """Return the samples of the batches, one by one."""
    inputs, targets = zip(*batches_of(BATCHES), strict=True)
    return TensorDataset(torch.cat(inputs), torch.cat(targets))


def take_turns(variants: Mapping[str, Train], seed: int) -> dict[str, list[float]]:
    """Return the microseconds of a batch of each validation, with its share of the step and the epoch around it."""
    torch.set_num_threads(1)
    order, shuffle = list(variants), random.Random(seed).shuffle
    turns = {name: Alternating(batches_of(1)) for name in order}
    for name in order:
        turns[name].start(variants[name], ROUNDS)
    spent: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(ROUNDS):
        shuffle(order)
        for name in order:
            spent[name].append(turns[name].take() / BATCHES * 1e6)
    return {name: each[WARM_UP:] for name, each in spent.items()}
