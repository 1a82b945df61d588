"""Record one attempt: its events, requests, batches and handler times."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import heliograph as h
import numpy as np
import torch
from heliograph.events import Event, History, OrderedSignal, Receiver, Request
from torch import Tensor

from .attempt_facts import attempt_of
from .format.lines import ROWS, Items, attempt_items, block_items, counter_values, event_items, format_line, items_of
from .format.plain import NAME, shorten
from .format.records import (
    COLUMNS,
    Counters,
    DigestBlock,
    HandlerTime,
    RepeatEntry,
    RequestEntry,
    TimesEntry,
    change_of,
)
from .format.writer import RecordingWriter
from .verbs import COUNTED, SERVED, TAKEN_BACK

FIRST_TIMES, TIMES_EVERY = 1.0, 10.0  # seconds
# Batches are written after so many seconds, or this share of the attempt's time: a kill loses no more.
SHORTEST, LONGEST, SHARE = 1.0, 10.0, 0.01
WIDTH, SKIPPED = len(COLUMNS), COLUMNS.index("skipped_batches")
HOT = (h.BatchStart, h.ForwardEnd, h.BackwardEnd, h.GradientsReady, h.StepEnd, h.BatchEnd, h.ShouldStop)
FIRST = 256  # batches that are all timed, for the sake of short runs
STRIDE = 7919  # a prime, so that the timed batches do not coincide with a period of the training


class EventTimer:
    """Time the handlers of one event, without the time of events that they emit.

    Args:
        event: the event's name.
        inner: the time in events that the running handler emits; one number, shared by all timers.
    """

    def __init__(self, event: str, inner: list[float]) -> None:
        self.event, self._inner, self.timed = event, inner, 0
        self._spent: dict[str, tuple[int, float, float]] = {}

    def time(self, receivers: Iterator[Receiver], owners: Mapping[int, str]) -> Iterator[Receiver]:
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
            times, before, longest = spent.get(owner, (0, 0.0, 0.0))
            spent[owner] = times + (owner not in seen), before + seconds, max(longest, seconds)
            seen.add(owner)

    def rows(self, emissions: int) -> Iterator[HandlerTime]:
        for owner, (times, total, longest) in self._spent.items():
            count = max(times, round(times * emissions / self.timed))
            yield HandlerTime(shorten(str(owner), NAME), self.event, times, count, total, longest)


class HandlerTimer:
    """Time the handlers of all events: rare events always, the events of every batch in a sample of batches.

    Args:
        bus: the bus whose signals are timed.
        sample: after the first batches, one batch in `sample` is timed.

    Attributes:
        due: the next batch to time, from 0.
        is_on: whether the events of the current batch are timed.
    """

    def __init__(self, bus: h.Bus, sample: int) -> None:
        self.due, self.is_on = 0, False
        self._bus, self._sample, self._stretch = bus, sample, 0
        self._timers: dict[type[Event], EventTimer] = {}
        self._hot: list[OrderedSignal[Event]] = []
        self._timed_batches = 0
        self._inner = [0.0]

    def attach(self) -> None:
        for signal in self._bus.signals():
            if signal.event not in self._timers:
                self._timers[signal.event] = EventTimer(signal.event.name, self._inner)
                if signal.event in HOT:
                    self._hot.append(signal)
            if signal.event not in HOT:
                self._start(signal)

    def detach(self) -> None:
        self.is_on = False
        for signal in self._bus.signals():
            self._end(signal)

    def switch_on(self) -> None:
        self.is_on = True
        self._timed_batches += 1
        for signal in self._hot:
            self._start(signal)

    def switch_off(self) -> None:
        self.is_on = False
        for signal in self._hot:
            self._end(signal)

    def _start(self, signal: OrderedSignal[Any]) -> None:
        if signal.probe is None:
            signal.probe = self._timers[signal.event].time

    def _end(self, signal: OrderedSignal[Any]) -> None:
        if signal.event in self._timers and signal.probe == self._timers[signal.event].time:
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
        complete = self._timed_batches - self.is_on  # without the current batch
        for event, timer in self._timers.items():
            is_sampled = event in HOT and complete
            rows += timer.rows(round(timer.timed * batches / complete) if is_sampled else timer.timed)
        return TimesEntry(tuple(rows))


MAX_SERVED = 100  # recorded numbers of requests that one event serves
LATEST = 8  # requests whose count may still increase


@dataclass(slots=True)
class _RepeatableRequest:
    number: int
    request: Request
    times: int


class RequestTracker:
    """Turn the history of a control into entries, and find the requests that an event serves.

    Attributes:
        seen: the number of requests read; less than the history's total if there are new ones.
    """

    def __init__(self, history: History) -> None:
        self.seen = 0
        self._history = history
        self._latest: list[_RepeatableRequest] = []
        self._pending: dict[str, list[int]] = {}
        self._drops: list[tuple[int, Request]] = []  # the total at the time, and the veto that dropped requests
        history.drop_watcher = self._add_drop

    def detach(self) -> None:
        self._history.drop_watcher = None

    def new_entries(self) -> Iterator[RequestEntry | RepeatEntry]:
        history, total = self._history, self._history.total
        for latest in self._latest:
            if latest.request.times != latest.times:
                latest.times = latest.request.times
                yield RepeatEntry(latest.number, latest.times)
        # The history may have dropped the oldest of very many new requests.
        for number in range(total - min(total - self.seen, len(history)), total):
            yield from self._dropped_by(number)
            request = history[number - total]
            if request.verb in COUNTED:
                self._latest.append(_RepeatableRequest(number, request, request.times))
            if request.verb in TAKEN_BACK and request.verb not in COUNTED:  # a veto takes back when it drops
                self._pending.pop(TAKEN_BACK[request.verb], None)
            pending = self._pending.setdefault(request.what, [])
            if len(pending) < MAX_SERVED:
                pending.append(number)
            yield RequestEntry(number, _shortened(request))
        yield from self._dropped_by(total)
        self._latest = self._latest[-LATEST:]
        self.seen = total

    def _add_drop(self, veto: Request) -> None:
        self._drops.append((self._history.total, veto))

    def _dropped_by(self, total: int) -> Iterator[RepeatEntry]:
        while self._drops and self._drops[0][0] <= total:
            veto = self._drops.pop(0)[1]
            self._pending.pop(TAKEN_BACK[veto.verb], None)
            yield from (RepeatEntry(latest.number, latest.times) for latest in self._latest if latest.request is veto)

    def pop_served(self, event: str, data: Mapping[str, Any]) -> list[int] | None:
        """Return the numbers of the requests that an event serves, None for an event that serves none."""
        subject = SERVED.get(event) if event != h.ChangeServed.name else change_of(data).what
        return None if subject is None else self._pending.pop(subject, [])

    def drop_pending(self) -> None:
        self._pending = {verb: numbers for verb, numbers in self._pending.items() if verb == "stop"}


def _shortened(request: Request) -> Request:
    by, target, through = (shorten(name, NAME) for name in (request.by, request.target, request.through))
    return replace(request, by=by, target=target, through=through, reason=shorten(request.reason))


class OpenBlock:
    """Collect the counters of batches, and set the run's clock, which advances only at batches and events.

    Attributes:
        values: the `COLUMNS` of each batch.
        stop: the length of `values` at which the next batch needs more work than `add`.
        due: the run's clock at which the batches are written.
        progress: the run's progress.
        hundredths: the run's clock, in hundredths of a second.
        offset: the run's clock minus the monotonic clock.
        is_single: whether there is one rank; several ranks agree on the time.
    """

    def __init__(self, run: h.Run) -> None:
        self.values = array("q")
        self.stop = self.due = 0
        self.progress = run.progress
        self.offset = self.progress.own_seconds - monotonic()
        self.hundredths = 0
        self.is_single = run.engine.world_size == 1

    def add(self, run: h.Run) -> None:
        """Add the batch that has ended."""
        progress = self.progress
        self.set_clock()
        self.values.extend((  # one call, so that a Ctrl-C leaves a block either with or without the batch
            self.hundredths, progress.steps, progress.skipped_steps, progress.skipped_batches, progress.samples,
            run.stepping.window, progress.tokens,
        ))  # fmt: skip
        if self.hundredths >= self.due:
            self.stop = 0

    # The clock.

    def set_clock(self) -> None:
        if self.is_single:
            self.hundredths = int((monotonic() + self.offset) * 100)
            self.progress.set_seconds(self.hundredths / 100)
        else:
            self.hundredths = int(round(self.progress.seconds * 100, 6))

    def release_clock(self) -> None:
        if self.is_single:
            self.progress.set_seconds(self.progress.own_seconds)
            self.progress.load_state_dict(self.progress.state_dict())


class AttemptRecorder:
    """Record the running attempt.

    Args:
        run: the run.
        sample: after the first batches, the handlers are timed in one batch in `sample`.
        losses: whether the loss of every batch is recorded.

    Attributes:
        block: the open block of batches; it sets the run's clock.
        progress: the run's progress.
        attempt: the attempt without entries.
        path: the file, None until it is known.
        timer: the timer of the handlers.
        writer: the writer of the file, None if it is not open.
    """

    def __init__(self, run: h.Run, sample: int, *, losses: bool) -> None:
        self.block, self.progress = OpenBlock(run), run.progress
        self.attempt = attempt_of(run, losses=losses)
        self.path: Path | None = None
        self._history = run.control.history
        self.requests, self.timer = RequestTracker(self._history), HandlerTimer(run.bus, sample)
        self.writer: RecordingWriter | None = None
        self._losses: list[Tensor | None] | None = [] if losses else None
        self._began, self._times_due = monotonic(), FIRST_TIMES
        self._batches = 0
        self._first = Counters()  # before the first batch of the block
        self._lines: list[str] = []
        self._later_lines: list[str] | None = None  # after an event that was begun
        self._begun_event: tuple[str, float, Sequence[float], list[int] | None] = "", 0.0, (), None
        self._last: tuple[Any, ...] = ()  # counters

    # The clock.

    @property
    def clock(self) -> float:
        return monotonic() - self._began

    def handle_load(self) -> None:  # of a state
        self.end_block()
        self.add_requests()
        self.requests.drop_pending()
        self.block.offset = self.progress.own_seconds - monotonic()

    # Entries.

    def add_event(self, event: str, data: Mapping[str, Any], *, sets_clock: bool = True) -> None:
        """Add an event after the batches and requests before it.

        `sets_clock` is False for an event emitted during another event, so that all handlers of the latter read the
        same time.
        """
        self._prepare_event()
        if sets_clock:
            self.block.set_clock()
        self._last = counter_values(self.progress)
        served = self.requests.pop_served(event, data)
        self._add(event_items(event, self.clock, self._last, data if served is None else {**data, "asked": served}))

    def _add(self, items: Items) -> None:
        (self._lines if self._later_lines is None else self._later_lines).append(format_line(*items))

    def begin_event(self, event: str) -> None:
        """Add an event without data; `finish_event` adds the data, before the entries that follow."""
        self._prepare_event()
        self.block.set_clock()
        self._last = counter_values(self.progress)
        self._later_lines = []
        self._begun_event = event, self.clock, self._last, self.requests.pop_served(event, {})

    def finish_event(self, data: Mapping[str, Any]) -> None:
        later, self._later_lines = self._later_lines, None
        event, clock, counters, served = self._begun_event
        data = data if served is None else {**data, "asked": served}
        self._lines.append(format_line(*event_items(event, clock, counters, data)))
        self._lines += later or ()

    def _prepare_event(self) -> None:
        self.end_block()
        self.add_requests()

    def _check_next(self) -> None:  # there is a new request
        self.block.stop = 0

    def add_requests(self) -> None:
        entries = list(self.requests.new_entries())
        if entries:
            self.end_block()
        for entry in entries:
            self._add(items_of(entry))

    def add_digests(self, block: DigestBlock) -> None:
        self._add(items_of(block))

    def add_times(self, *, now: bool = False) -> None:
        if now or self.clock > self._times_due:
            self._times_due = self.clock + TIMES_EVERY
            self._add(items_of(self.timer.times(self.batches)))

    # Batches.

    @property
    def batches(self) -> int:
        return self._batches + len(self.block.values) // WIDTH

    def add_batch(self, run: h.Run) -> None:
        block = self.block
        if self._history.total != self.requests.seen:
            self.add_requests()
        batches = self.batches
        if self.timer.is_on or batches >= self.timer.due:
            self.timer.step(batches)
        if not block.values:
            self._begin_block()
        if self._losses is not None:
            # A copy, since a CUDA graph may reuse the memory. It replaces the loss of an interrupted batch.
            loss = None if run.loss is None else run.loss.detach().clone().reshape(())
            self._losses[batches - self._batches :] = [loss]
        block.add(run)
        if len(block.values) == ROWS * WIDTH or block.hundredths >= block.due:
            self.end_block()
        self.write()
        free = self.timer.due - batches - 1 if self._losses is None and not self.timer.is_on else 0
        block.stop = min(len(block.values) + free * WIDTH, ROWS * WIDTH - WIDTH) if block.values else 0

    def end_block(self) -> None:
        block, first, losses = self.block, self._first, self._losses
        block.stop = 0
        if not block.values:
            return
        rows = np.frombuffer(block.values, np.int64).reshape(-1, WIDTH)
        numbers = None
        if losses is not None:
            skips = np.diff(rows[:, SKIPPED], prepend=first.skipped_batches) != 0
            numbers = _read_losses(losses[: len(rows)], skips.tolist())
        hundredths, steps, skipped_steps, skipped_batches, samples, _, tokens = rows[-1].tolist()
        last = replace(
            first, batch=first.batch + len(rows), steps=steps, skipped_steps=skipped_steps,
            skipped_batches=skipped_batches, samples=samples, seconds=hundredths / 100, tokens=tokens,
        )  # fmt: skip
        clock = max(0.0, first.seconds - block.offset - self._began)  # the attempt's clock
        line = format_line(*block_items(first, clock + last.seconds - first.seconds, rows, numbers))
        # One assignment at the end, so that a Ctrl-C leaves either the open block or its line.
        self._lines, self._last, self._batches, self._losses, block.values = (
            [*self._lines, line], counter_values(last), self.batches, None if losses is None else [], array("q"),
        )  # fmt: skip

    def _begin_block(self) -> None:
        progress, block = self.progress, self.block
        self._first = replace(
            Counters(*self._last),
            epoch=progress.epoch,
            batch=progress.batch - 1,
            earlier_batches=progress.earlier_batches,
            validations=progress.validations,
            evaluated=progress.evaluated,
        )
        shortest = SHORTEST if self._losses is None else LONGEST  # to read the losses waits for the device
        pause = min(LONGEST, max(shortest, SHARE * self.clock))
        block.due = int((self._first.seconds + pause) * 100)

    # The file.

    def open(self, writer: RecordingWriter) -> None:
        if self.path != writer.path:
            self._lines.insert(0, format_line(*attempt_items(self.attempt)))
        self.writer, self.path = writer, writer.path
        self._history.watcher = self._check_next

    def write(self) -> None:
        """Write the lines; an OSError is not raised again until a write succeeds."""
        if self.writer is not None and (self._lines or self.writer.is_failing):
            self._hand_over(self.writer)
            self.writer.write()

    def _hand_over(self, writer: RecordingWriter) -> None:
        writer.add(self._lines)  # first, so that a Ctrl-C loses no line
        self._lines = []

    def close(self) -> None:
        self.timer.detach()
        self._history.watcher = None
        self.requests.detach()
        self.block.release_clock()
        self.end_block()
        self.add_requests()
        writer, self.writer = self.writer, None
        if writer is not None:
            self._hand_over(writer)
            writer.close()


def _read_losses(losses: Sequence[Tensor | None], skips: Sequence[bool]) -> tuple[float, ...]:
    """Copy the losses of a block from their device at once; the loss of a skipped batch is NaN."""
    tensors = [loss for loss in losses if loss is not None]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    values = [math.nan if loss is None else next(numbers) for loss in losses]
    return tuple(math.nan if skip else value for value, skip in zip(values, skips, strict=True))
