"""How variants of a training loop are timed against each other: in turns of 100 steps, in shuffled order."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from queue import SimpleQueue
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

STEPS = 100  # in a turn; with longer ones, a burst of another job hits a single variant and drowns what is looked for
EPOCH = 5_000
WARM_UP = 10  # turns
SIZE = 8

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Train = Callable[["Turns", int], object]
Seconds = dict[str, list[float]]


def no_wait() -> None:
    """Do nothing: the CPU is done with a step when it is left."""


class Turns:
    """A loader that waits for its turn before every 100 batches, so the loop that reads it is the real one, suspended.

    Every variant runs in a thread of its own, of which one at a time continues. Within a turn the batches come from C
    code, as they do from a list. A loop that reads another loader calls `wait_for_turn` itself, every 100 batches.

    Args:
        batches: of an epoch.
        wait: called at the end of each turn, to wait for what a device has still to do.
    """

    clock = staticmethod(perf_counter)

    def __init__(self, batches: list[Batch], wait: Callable[[], object] = no_wait) -> None:
        self._wait = wait
        self._chunks = [batches[begin : begin + STEPS] for begin in range(0, len(batches), STEPS)]
        self._go: SimpleQueue[None] = SimpleQueue()
        self._outcome: SimpleQueue[float | BaseException] = SimpleQueue()
        self._begin: float | None = None

    def __len__(self) -> int:
        return len(self._chunks) * STEPS

    def __iter__(self) -> Iterator[Batch]:
        return chain.from_iterable(self._in_turn())

    def start(self, train: Train, epochs: int) -> None:
        """Run a loop in its own thread, up to its first turn."""

        def work() -> None:
            torch.set_num_threads(1)
            try:
                train(self, epochs)
                self._outcome.put(self._elapsed())
            except BaseException as error:  # noqa: BLE001  # raised by `take`
                self._outcome.put(error)

        threading.Thread(target=work, daemon=True).start()

    def take(self) -> float:
        """Let the loop do one turn; return the seconds that it took, the end of an epoch included."""
        self._go.put(None)
        outcome = self._outcome.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def wait_for_turn(self) -> None:
        """End a turn, if one has begun, and wait for the next."""
        if self._begin is not None:
            self._outcome.put(self._elapsed())
        self._go.get()
        self._begin = self.clock()

    def _in_turn(self) -> Iterator[list[Batch]]:
        for chunk in self._chunks:
            self.wait_for_turn()
            yield chunk

    def _elapsed(self) -> float:
        assert self._begin is not None, "the loop never read its loader"
        self._wait()
        return self.clock() - self._begin


def race(
    variants: Mapping[str, Train],
    epochs: int,
    seed: int,
    batches: list[Batch] | None = None,
    wait: Callable[[], object] = no_wait,
) -> Seconds:
    """Return the seconds of each turn of each variant; in one round all do the same steps.

    Who starts first is shuffled too: where its memory lies moves a variant by 0.3 µs a step for the process's life.

    Args:
        variants: loops by name.
        epochs: how many each trains.
        seed: of the order of the turns.
        batches: of an epoch; 5,000 in plain memory by default.
        wait: called at the end of each turn, to wait for what a device has still to do.
    """
    torch.set_num_threads(1)
    batches = batches or batches_of(EPOCH)
    order, shuffle = list(variants), random.Random(seed).shuffle
    shuffle(order)
    turns = {name: Turns(batches, wait) for name in order}
    for name in order:
        turns[name].start(variants[name], epochs)
    seconds: Seconds = {name: [] for name in variants}
    for index in range(epochs * len(batches) // STEPS):
        if index == WARM_UP:
            gc.collect()
            gc.freeze()
        shuffle(order)
        for name in order:
            seconds[name].append(turns[name].take())
    return {name: each[WARM_UP:] for name, each in seconds.items()}


def batches_of(number: int) -> list[Batch]:
    """Return prebuilt batches, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(SIZE, 17, generator=generator) for _ in range(number)]
    return [(each[:, :16].clone(), each[:, 16:].clone()) for each in drawn]


class Rows(Dataset[Batch]):
    """A dataset as users write it: in Python, one row at a time."""

    def __init__(self, number: int) -> None:
        self.inputs, self.targets = map(torch.cat, zip(*batches_of(number), strict=True))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.targets[index]


def shuffled(num_workers: int = 0) -> DataLoader[Batch]:
    """Return a loader of an epoch that shuffles."""
    context = "forkserver" if num_workers else None  # each loop has a thread, so a fork could block forever
    return DataLoader(Rows(EPOCH), SIZE, shuffle=True, num_workers=num_workers, multiprocessing_context=context)


def tiny_model() -> nn.Module:
    """Return the model of all benchmarks, so small that the loop around it shows."""
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def sgd(parameters: Any) -> torch.optim.SGD:
    """Return the optimizer of all benchmarks."""
    return torch.optim.SGD(parameters, lr=0.01)


def differences(seconds: Seconds, name: str, *bases: str) -> list[float]:
    """Return what each turn took beyond the mean of the bases in the same round, in microseconds a step."""
    base = [sum(each) / len(bases) for each in zip(*(seconds[other] for other in bases), strict=True)]
    return [(mine - other) / STEPS * 1e6 for mine, other in zip(seconds[name], base, strict=True)]


def per_step(seconds: list[float]) -> float:
    """Return the median, in microseconds a step."""
    return median(seconds) / STEPS * 1e6
