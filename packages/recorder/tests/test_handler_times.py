"""Handlers are timed; those of the events of every batch in a sample of batches."""

from __future__ import annotations

from typing import Any, cast

import pytest
from heliograph.events import BatchEnd, Bus, EpochEnd, Event, Run, SavePoint
from heliograph_recorder import attempt_recorder
from heliograph_recorder.attempt_recorder import HandlerTimer

RUN = cast("Run", object())


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the clock as a list of one number, which handlers change."""
    clock = [0.0]
    monkeypatch.setattr(attempt_recorder, "perf_counter", lambda: clock[0])
    return clock


def slow(seconds: list[float], by: float) -> Any:
    def handler(run: Run, event: Event) -> None:
        seconds[0] += by

    return handler


def times(timer: HandlerTimer, batches: int = 0) -> list[tuple[str, int, int, float, float]]:
    rows = timer.times(batches).rows
    return [(row.event, row.timed, row.emissions, row.seconds, row.longest) for row in rows]


def test_a_rare_event_is_timed_every_time(seconds: list[float]) -> None:
    bus = Bus()
    bus.on(EpochEnd, slow(seconds, 1.0))
    bus.on(EpochEnd, slow(seconds, 3.0))  # of the same name
    timer = HandlerTimer(bus, 10)
    timer.attach()
    for _ in range(2):
        bus.signal(EpochEnd).emit(RUN, EpochEnd(0))
    assert times(timer) == [("epoch_end", 2, 2, 8.0, 3.0)]


@pytest.mark.parametrize("sample", [2, 7, 32])
def test_the_events_of_every_batch_are_timed_in_a_sample(
    sample: int, seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_recorder, "FIRST", 0)
    bus = Bus()
    bus.on(BatchEnd, slow(seconds, 1.0))
    timer = HandlerTimer(bus, sample)
    timer.attach()
    offsets = set()
    for batch in range(sample * sample):
        if timer.is_on:
            offsets.add(batch % sample)
        bus.signal(BatchEnd).emit(RUN, BatchEnd())
        if timer.is_on or batch >= timer.due:
            timer.step(batch)
    ((_, timed, emissions, _, _),) = times(timer, sample * sample)
    assert timed == len(offsets)  # no two at the same offset
    assert sample - 1 <= timed <= sample
    assert emissions == sample * sample


def test_all_of_the_first_batches_are_timed(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_recorder, "FIRST", 4)
    bus = Bus()
    timer = HandlerTimer(bus, 10)
    costs = iter([50.0, *[2.0] * 99])  # the first call is slow
    bus.on(BatchEnd, lambda run, event: seconds.__setitem__(0, seconds[0] + next(costs)))
    timer.attach()
    timed = []
    for batch in range(44):
        timer.step(batch)
        timed.append(timer.is_on)
        bus.signal(BatchEnd).emit(RUN, BatchEnd())
    timer.step(44)
    (row,) = timer.times(44).rows
    assert timed[:5] == [True, True, True, True, True]
    assert row.timed == sum(timed)
    assert row.emissions == 44
    assert row.estimate == pytest.approx(50 + 43 * 2)


def test_the_time_of_an_event_within_a_handler_is_not_counted_twice(seconds: list[float]) -> None:
    bus = Bus()

    def emitting(run: Run, event: Event) -> None:
        seconds[0] += 1.0
        bus.signal(EpochEnd).emit(run, EpochEnd(0))
        seconds[0] += 2.0

    bus.on(SavePoint, emitting)
    bus.on(SavePoint, slow(seconds, 4.0))
    bus.on(EpochEnd, slow(seconds, 10.0))
    timer = HandlerTimer(bus, 10)
    timer.attach()
    bus.signal(SavePoint).emit(RUN, SavePoint())
    assert {(row.event, row.seconds) for row in timer.times(0).rows} == {
        ("save_point", 3.0),
        ("save_point", 4.0),
        ("epoch_end", 10.0),
    }


def test_after_detaching_there_are_no_probes(seconds: list[float]) -> None:
    bus = Bus()
    for event in (BatchEnd, EpochEnd):
        bus.on(event, slow(seconds, 1.0))
    other = bus.signal(SavePoint)
    other.probe = lambda receivers, owners: receivers
    timer = HandlerTimer(bus, 1)
    timer.attach()
    timer.step(0)
    assert bus.signal(BatchEnd).probe is not None
    timer.detach()
    assert [signal.event for signal in bus.signals() if signal.probe is not None] == [SavePoint]
