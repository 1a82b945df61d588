from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heliograph.builtin_callbacks.checkpoint import verify_resume
from heliograph.builtin_callbacks.checkpoint.verify_resume import CHUNK, Row, RowReader, copied
from torch import Tensor


class Arrival:
    """A copy that comes when it is asked to."""

    def __init__(self, losses: Tensor) -> None:
        self.losses = losses.clone()
        self.is_there = False
        self.waits = 0

    def read(self) -> Any:
        self.waits += not self.is_there
        return self.losses.tolist()


class Device:
    """Stands for a device that takes its time."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.rows = RowReader()

    def fetch(self, losses: Tensor) -> Arrival:
        self.arrivals.append(Arrival(losses))
        return self.arrivals[-1]

    def add(self, number: int, *values: float) -> list[tuple[int, float]]:
        losses = [torch.tensor(value) for value in values]
        run: Any = SimpleNamespace(
            progress=SimpleNamespace(batches=number, batch=number, steps=number, samples=number),
            control=SimpleNamespace(skips_batch=not values),
            stepping=SimpleNamespace(batch_losses=losses),
        )
        return [(row.number, row.loss) for row in self.rows.of(run)]

    def late(self, *, wait: bool = False) -> list[Row]:
        return list(self.rows.late(wait=wait))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(verify_resume, "Fetched", made.fetch)
    monkeypatch.setattr(verify_resume, "on_host", lambda losses: False)
    return made


def test_nothing_is_waited_for(device: Device) -> None:
    for number in range(1, CHUNK + 1):
        assert device.add(number, number / 4) == []
    (arrival,) = device.arrivals
    for number in range(CHUNK + 1, 2 * CHUNK):
        assert device.add(number, number / 4) == []
    arrival.is_there = True
    assert device.add(2 * CHUNK, 0.0) == [(number, number / 4) for number in range(1, CHUNK + 1)]
    assert arrival.waits == 0


def test_batches_come_in_their_order_with_those_that_were_left_out(device: Device) -> None:
    for number, values in enumerate([(1.0,), (), (2.0, 3.0), ()], start=1):
        device.add(number, *values)
    assert device.late() == []
    device.add(5)
    assert device.late() == []
    found = [(row.number, row.loss, row.is_skipped) for row in device.late(wait=True)]
    assert found == [(1, 1.0, False), (2, 0.0, True), (3, 2.0, False), (4, 0.0, True), (5, 0.0, True)]


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
