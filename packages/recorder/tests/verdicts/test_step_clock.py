"""Which batches are timed, and what of them."""

from __future__ import annotations

import pytest
from heliograph_recorder.verdicts import plugin
from heliograph_recorder.verdicts.plugin import StepClock


class Loop:
    """Batches whose parts take known times, and a clock that looks at those that are due."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, load: float, forward: float, rest: float) -> None:
        self.now, self.count, self.looks = 0.0, 0, 0
        self.parts = load, forward, rest
        self.clock = StepClock()
        monkeypatch.setattr(plugin, "perf_counter", lambda: self.now)

    def run(self, batches: int) -> None:
        load, forward, rest = self.parts
        for _ in range(batches):
            self.now += load
            if self.count >= self.clock.due:
                self.clock.end_load()
            self.now += forward
            if self.count >= self.clock.due:
                self.clock.end_forward()
            self.now += rest
            self.count += 1
            if self.count >= self.clock.due:
                self.looks += 1
                self.clock.end_batch(self.count, self.count)


def test_every_slow_batch_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, load=0.25, forward=0.5, rest=0.25)
    loop.run(11)
    sums = loop.clock.take()
    assert (sums.sampled, sums.batch, sums.load, sums.forward) == (10, 10.0, 2.5, 5.0)  # but the first
    assert loop.clock.sums.sampled == 0


def test_of_fast_batches_some_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, load=0.00001, forward=0.00002, rest=0.00003)
    loop.run(100_000)  # 6 seconds
    sums = loop.clock.take()
    assert 150 <= sums.sampled <= 300  # at most one in 20 ms
    assert loop.looks <= 2 * sums.sampled + 2
    assert sums.batch / sums.sampled == pytest.approx(0.00006)
    assert sums.load / sums.sampled == pytest.approx(0.00001)
    assert sums.forward / sums.sampled == pytest.approx(0.00002)


def test_what_is_done_between_two_batches_is_no_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, load=0.25, forward=0.5, rest=0.25)
    loop.run(2)
    loop.clock.begin("validation")
    loop.now += 8.0
    loop.clock.end("validation")
    loop.clock.begin("save")
    loop.now += 4.0
    loop.clock.end("save")
    loop.run(1)
    sums = loop.clock.take()
    assert (sums.sampled, sums.load) == (2, 0.5)
    assert (sums.times, sums.seconds) == ({"validation": 1, "save": 1}, {"validation": 8.0, "save": 4.0})


def test_batches_that_were_not_seen_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, load=0.25, forward=0.5, rest=0.25)
    loop.run(3)
    loop.now, loop.count = loop.now + 100.0, loop.count + 50  # as if the plugin had been disabled
    loop.run(3)
    sums = loop.clock.take()
    assert (sums.sampled, sums.batch) == (4, 4.0)


def test_an_end_without_a_begin_is_nothing() -> None:
    clock = StepClock()
    clock.end("validation")
    clock.end("save")
    clock.end_forward()
    assert clock.sums.times == {}
