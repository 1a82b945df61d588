"""Time the handlers of a bus: rare events every time, the events of every batch in the first batches and a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter

from heliograph import (
    BackwardEnd,
    BatchEnd,
    BatchStart,
    Bus,
    ForwardEnd,
    GradientsReady,
    OrderedSignal,
    PredictBatchEnd,
    PredictBatchStart,
    ShouldStop,
    StepEnd,
    TestBatchEnd,
    TestBatchStart,
    ValidationBatchEnd,
    ValidationBatchStart,
)
from heliograph.events import CATALOGUE, Event
from heliograph.spi import Receiver

from .format.plain import NAME, shorten
from .format.records import HandlerTime, TimesEntry

Probe = Callable[[Iterator[Receiver], Mapping[int, str]], Iterator[Receiver]]
HOT = (BatchStart, ForwardEnd, BackwardEnd, GradientsReady, StepEnd, BatchEnd, ShouldStop)
EVALUATION = (
    ValidationBatchStart, ValidationBatchEnd, TestBatchStart, TestBatchEnd, PredictBatchStart, PredictBatchEnd,
)  # fmt: skip
FIRST = 256  # batches that are all timed, so that a short run has enough times
STRIDE = 7919  # a prime, so that the timed batches do not coincide with a period of the training


class EventTimer:
    """Times one event's handlers, without the time of events that these emit themselves.

    Args:
        event: its name.
        inner: the time in events that the running handler emits; one number that all timers share.
        sample: `time_some` times one emission in `sample`.
    """

    def __init__(self, event: str, inner: list[float], sample: int = 1) -> None:
        self.event, self._inner, self._sample = event, inner, sample
        self.emissions = self.timed = 0
        self._spent: dict[str, tuple[int, float, float]] = {}

    def time_every(self, receivers: Iterator[Receiver], owners: Mapping[int, str]) -> Iterator[Receiver]:
        self.timed += 1
        spent, inner = self._spent, self._inner
        seen: set[str] = set()  # a plugin with several handlers counts an emission once
        for receiver in receivers:
            outer, inner[0] = inner[0], 0.0
            begin = perf_counter()
            yield receiver
            total = perf_counter() - begin
            seconds, inner[0] = total - inner[0], outer + total
            owner = owners[id(receiver)]
            times, former, longest = spent.get(owner, (0, 0.0, 0.0))
            spent[owner] = times + (owner not in seen), former + seconds, max(longest, seconds)
            seen.add(owner)

    def time_some(self, receivers: Iterator[Receiver], owners: Mapping[int, str]) -> Iterator[Receiver]:
        number, self.emissions = self.emissions, self.emissions + 1
        return receivers if number % self._sample else self.time_every(receivers, owners)

    def rows(self, emissions: int) -> Iterator[HandlerTime]:
        for owner, (times, total, longest) in self._spent.items():
            count = max(times, round(times * emissions / self.timed))
            yield HandlerTime(shorten(str(owner), NAME), self.event, times, count, total, longest)


class HandlerTimer:
    """Times all handlers of a bus with probes on its signals.

    Args:
        bus: its signals are timed.
        sample: one batch in `sample` is timed, after the first ones.

    Attributes:
        due: the next batch to time, from 0.
        is_on: whether the events of every batch are timed now.
    """

    def __init__(self, bus: Bus, sample: int) -> None:
        self.due, self.is_on = 0, False
        self._bus, self._sample, self._stretch = bus, sample, 0
        self._timers: dict[type[Event], EventTimer] = {}
        self._probes: dict[type[Event], Probe] = {}
        self._hot: list[tuple[OrderedSignal[Event], Probe]] = []
        self._timed_batches = 0
        self._inner = [0.0]

    def attach(self) -> None:
        for signal in self._bus.signals():
            if signal.event not in self._timers:
                self._add(signal)
            if signal.event not in HOT and signal.probe is None:
                signal.probe = self._probes[signal.event]

    def detach(self) -> None:
        self.switch_off()
        for signal in self._bus.signals():
            if signal.probe is not None and signal.probe == self._probes.get(signal.event):
                signal.probe = None

    def switch_on(self) -> None:
        self.is_on = True
        self._timed_batches += 1
        for signal, probe in self._hot:
            if signal.probe is None:
                signal.probe = probe

    def switch_off(self) -> None:
        self.is_on = False
        for signal, probe in self._hot:
            if signal.probe == probe:
                signal.probe = None

    def step(self, batch: int) -> None:
        if batch < FIRST:
            self.switch_on()
            return
        if self.is_on:
            self.switch_off()
        if batch >= self.due:
            self.switch_on()
            self._stretch = batch // self._sample + 1
            self.due = self._stretch * self._sample + self._stretch * STRIDE % self._sample

    def times(self, batches: int) -> TimesEntry:
        rows: list[HandlerTime] = []
        complete = self._timed_batches - self.is_on  # the last one may be incomplete
        for event, timer in self._timers.items():
            emissions = timer.emissions if event in EVALUATION or event not in CATALOGUE else timer.timed
            if event in HOT and complete:
                emissions = round(timer.timed * batches / complete)
            rows += timer.rows(emissions)
        return TimesEntry(tuple(rows))

    def _add(self, signal: OrderedSignal[Event]) -> None:
        event = signal.event
        is_sampled = event in EVALUATION or event not in CATALOGUE
        timer = self._timers[event] = EventTimer(event.name, self._inner, self._sample)
        self._probes[event] = timer.time_some if is_sampled else timer.time_every
        if event in HOT:
            self._hot.append((signal, self._probes[event]))
