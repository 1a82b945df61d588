from __future__ import annotations

import gc
import weakref

import torch
from heliograph.builtin_callbacks.checkpoint.verify_resume import CHUNK, POLL_EVERY, LossBatch, WaitingLosses, copied
from torch import Tensor


class Arrival:
    """A copy that comes when it is asked to."""

    def __init__(self) -> None:
        self.is_there = False
        self.waits = 0

    def query(self) -> bool:
        return self.is_there

    def synchronize(self) -> None:
        self.waits += 1
        self.is_there = True


class Device:
    """Stands for a device that takes its time."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.losses = WaitingLosses(self.fetch)

    def fetch(self, losses: Tensor) -> tuple[Tensor, Arrival]:
        self.arrivals.append(Arrival())
        return losses.clone(), self.arrivals[-1]

    def add(self, number: int, *values: float) -> list[tuple[int, list[float]]]:
        batch = LossBatch((number, number, number, number), [torch.tensor(value) for value in values])
        return [(each.counters[0], found) for each, found in self.losses.add(batch)]


def test_nothing_is_waited_for() -> None:
    device = Device()
    for number in range(1, CHUNK + 1):
        assert device.add(number, number / 4) == []
    (arrival,) = device.arrivals
    for number in range(CHUNK + 1, 2 * CHUNK):
        assert device.add(number, number / 4) == []
    arrival.is_there = True
    assert device.add(2 * CHUNK, 0.0) == [(number, [number / 4]) for number in range(1, CHUNK + 1)]
    assert arrival.waits == 0


def test_the_device_is_asked_every_now_and_then() -> None:
    device = Device()
    for number in range(1, CHUNK + 1):
        device.add(number, 0.5)
    device.arrivals[0].is_there = True
    found = [len(device.add(CHUNK + number, 0.5)) for number in range(1, POLL_EVERY + 1)]
    assert found == [0] * (POLL_EVERY - 1) + [CHUNK]


def test_batches_come_in_their_order_with_those_that_were_left_out() -> None:
    device = Device()
    for number, values in enumerate([(1.0,), (), (2.0, 3.0), ()], start=1):
        device.add(number, *values)
    device.losses.send()
    device.add(5)
    device.losses.send()
    assert list(device.losses.arrived()) == []
    found = [(batch.counters[0], values) for batch, values in device.losses.arrived(wait=True)]
    assert found == [(1, [1.0]), (2, []), (3, [2.0, 3.0]), (4, []), (5, [])]
    assert device.losses.is_empty


def test_what_is_given_up_does_not_come() -> None:
    device = Device()
    for number in range(1, CHUNK + 3):
        device.add(number, 0.5)
    device.losses.clear()
    assert device.losses.is_empty
    assert list(device.losses.arrived(wait=True)) == []


def test_a_copy_keeps_no_graph_alive_and_no_memory_of_the_loss() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    seen = weakref.ref(loss)
    kept = copied(loss, loss.device)
    with torch.no_grad():
        loss.zero_()
    del loss
    gc.collect()
    assert (kept.item(), kept.grad_fn, seen()) == (6.0, None, None)
