"""Time the handlers of a bus: each time where that is seldom; of the events of every batch the first, then a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import perf_counter

from ...events import (
    CATALOGUE,
    BatchEnd,
    BatchStart,
    Bus,
    Event,
    GradientsReady,
    OrderedSignal,
    ShouldStop,
    StepEnd,
    TestBatchEnd,
    TestBatchStart,
    ValidationBatchEnd,
    ValidationBatchStart,
)
from ...events.bus import Probe, Receiver
from .format.plain import NAME, short
from .format.records import HandlerTime, TimesEntry

HOT = (BatchStart, GradientsReady, StepEnd, BatchEnd, ShouldStop)
EVALUATION = (ValidationBatchStart, ValidationBatchEnd, TestBatchStart, TestBatchEnd)
FIRST = 256  # batches of which each is timed: so what is seldom is known at its true rate, in a short run too
STRIDE = 7919  # a prime: in each stretch of batches another one is timed, so that no rhythm of the training is hit


class Clock:
    """The times of one event's handlers, without what they spend in the handlers of events of their own.

    Args:
        event: its name.
        inner: the time in the events that are emitted within the running handler, one number that all clocks share.
        sample: of emissions that only some are timed of, one in so many.
    """

    def __init__(self, event: str, inner: list[float], sample: int = 1) -> None:
        self.event, self._inner, self._sample = event, inner, sample
        self.emissions = self.timed = 0
        self._spent: dict[str, tuple[int, float, float]] = {}

    def every(self, receivers: Iterator[Receiver], owners: Mapping[int, str]) -> Iterator[Receiver]:
        """Time each receiver; a probe."""
        self.timed += 1
        spent, inner = self._spent, self._inner
        seen: set[str] = set()  # of several handlers of one plugin, the first counts the emission
        for receiver in receivers:
            outer, inner[0] = inner[0], 0.0
            begin = perf_counter()
            yield receiver
            whole = perf_counter() - begin
            seconds, inner[0] = whole - inner[0], outer + whole
            owner = owners[id(receiver)]
            times, total, longest = spent.get(owner, (0, 0.0, 0.0))
            spent[owner] = times + (owner not in seen), total + seconds, max(longest, seconds)
            seen.add(owner)

    def some(self, receivers: Iterator[Receiver], owners: Mapping[int, str]) -> Iterator[Receiver]:
        """Count the emission, and time one of so many; a probe."""
        number, self.emissions = self.emissions, self.emissions + 1
        return receivers if number % self._sample else self.every(receivers, owners)

    def rows(self, emissions: int) -> Iterator[HandlerTime]:
        """Yield the times by owner, as a share of all emissions."""
        for owner, (times, total, longest) in self._spent.items():
            of_all = max(times, round(times * emissions / self.timed))
            yield HandlerTime(short(str(owner), NAME), self.event, times, of_all, total, longest)


class Timing:
    """Probes on the signals of a bus.

    Args:
        bus: the signals.
        sample: of the events of every batch, one batch in so many is timed, behind the first.

    Attributes:
        due: which batch, counted from 0, is to be timed next.
        is_on: whether the events of every batch are timed now.
    """

    def __init__(self, bus: Bus, sample: int) -> None:
        self.due, self.is_on = 0, False
        self._bus, self._sample, self._stretch = bus, sample, 0
        self._clocks: dict[type[Event], Clock] = {}
        self._probes: dict[type[Event], Probe] = {}
        self._hot: list[tuple[OrderedSignal[Event], Probe]] = []
        self._timed_batches = 0
        self._inner = [0.0]

    def attach(self) -> None:
        """Time the signals that there are by now, but those of every batch."""
        for signal in self._bus.signals():
            if signal.event not in self._clocks:
                self._add(signal)
            if signal.event not in HOT and signal.probe is None:
                signal.probe = self._probes[signal.event]

    def detach(self) -> None:
        """Take the probes off."""
        self.switch_off()
        for signal in self._bus.signals():
            if signal.probe is not None and signal.probe == self._probes.get(signal.event):
                signal.probe = None

    def switch_on(self) -> None:
        """Time the events of the batch that begins."""
        self.is_on = True
        self._timed_batches += 1
        for signal, probe in self._hot:
            if signal.probe is None:
                signal.probe = probe

    def switch_off(self) -> None:
        """Let the events of the batches that follow be."""
        self.is_on = False
        for signal, probe in self._hot:
            if signal.probe == probe:
                signal.probe = None

    def step(self, batch: int) -> None:
        """Switch over behind a batch, where it is time to.

        Args:
            batch: how many were counted before it.
        """
        if batch < FIRST:
            self.switch_on()
            return
        if self.is_on:
            self.switch_off()
        if batch >= self.due:
            self.switch_on()
            self._stretch = batch // self._sample + 1
            self.due = self._stretch * self._sample + self._stretch * STRIDE % self._sample

    def spent(self, batches: int) -> TimesEntry:
        """Return the times so far, in so many batches."""
        rows: list[HandlerTime] = []
        whole = self._timed_batches - self.is_on  # the last one may be amid
        for event, clock in self._clocks.items():
            emissions = clock.emissions if event in EVALUATION or event not in CATALOGUE else clock.timed
            if event in HOT and whole:
                emissions = round(clock.timed * batches / whole)
            rows += clock.rows(emissions)
        return TimesEntry(tuple(rows))

    def _add(self, signal: OrderedSignal[Event]) -> None:
        event = signal.event
        is_sampled = event in EVALUATION or event not in CATALOGUE
        clock = self._clocks[event] = Clock(event.name, self._inner, self._sample)
        self._probes[event] = clock.some if is_sampled else clock.every
        if event in HOT:
            self._hot.append((signal, self._probes[event]))
