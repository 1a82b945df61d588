"""Losses on a device, read without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CHUNK = 32  # batches: as many of the last ones a kill may lose
LOOK_EVERY = 8  # batches


class Arrival(Protocol):
    """When a copy is on the host; `torch.Event` is one."""

    def query(self) -> bool:
        """Return whether it is there."""

    def synchronize(self) -> object:
        """Wait for it."""


Fetch = Callable[[Tensor], tuple[Tensor, Arrival]]


class Batch(NamedTuple):
    """A batch whose losses are still on the device.

    Attributes:
        counters: number, batch, steps and samples, as in a row.
        losses: copies without a graph; none where the batch was left out.
    """

    counters: tuple[int, int, int, int]
    losses: Sequence[Tensor]


class WaitingLosses:
    """Batches whose losses are on their way to the host, in the order of the run.

    Args:
        fetch: begins to copy a tensor to the host; returns the copy, and what says when it is there.
    """

    def __init__(self, fetch: Fetch | None = None) -> None:
        self._fetch = fetch or start_fetch
        self._open: list[Batch] = []
        self._fetching: deque[tuple[list[Batch], Tensor | None, Arrival | None]] = deque()
        self._added = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is waited for."""
        return not self._open and not self._fetching

    def add(self, batch: Batch) -> Iterator[tuple[Batch, list[float]]]:
        """Take a batch in; yield those whose losses have arrived meanwhile."""
        self._open.append(batch)
        self._added += 1
        if len(self._open) == CHUNK:
            self.send()
        return self.arrived() if self._added % LOOK_EVERY == 0 else iter(())

    def send(self) -> None:
        """Begin to copy what is there."""
        batches, self._open = self._open, []
        losses = [loss for batch in batches for loss in batch.losses]
        if losses:
            self._fetching.append((batches, *self._fetch(torch.stack(losses))))
        elif batches:
            self._fetching.append((batches, None, None))

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[Batch, list[float]]]:
        """Yield the batches whose losses are on the host by now, with their values; or wait for those under way."""
        while self._fetching:
            batches, host, arrival = self._fetching[0]
            if arrival is not None and wait:
                arrival.synchronize()
            elif arrival is not None and not arrival.query():
                return
            self._fetching.popleft()
            values = iter([] if host is None else host.double().tolist())
            for batch in batches:
                yield batch, [next(values) for _ in batch.losses]

    def clear(self) -> None:
        """Forget them all."""
        self._open.clear()
        self._fetching.clear()


def start_fetch(losses: Tensor) -> tuple[Tensor, Arrival]:
    """Begin to copy losses to the host."""
    host = torch.empty(losses.shape, dtype=losses.dtype, pin_memory=True)
    host.copy_(losses, non_blocking=True)
    event = torch.Event(device=losses.device)
    event.record()
    return host, event


def copied(loss: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a loss without its graph, not waited for; a graph on a GPU may reuse the loss's own memory."""
    return loss.detach().clone().reshape(()).to(device, non_blocking=True)
