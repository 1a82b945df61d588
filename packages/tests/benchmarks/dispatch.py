"""One emission, outside of any loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import heliograph as h
from blinker import Signal
from heliograph.events import Bus, Progress
from heliograph.packages.tests.benchmarks.lean import idle_handler

NUMBERS = (0, 1, 5, 20)
CALLS, ROUNDS = 2_000, 60
GUARD, EMIT, SEND, PLAIN = "guard and emit", "emit", "blinker's send", "plain loop over a tuple"
WAIT = "emit, all wait for a count"
EMPTY = "empty"
Timed = Callable[[], float]


class Sender:
    """Stands for the run."""

    def __init__(self) -> None:
        self.progress = self.origin = Progress()


def empty() -> float:
    """Time the loop around the calls, which is subtracted."""
    begin = perf_counter()
    for _ in range(CALLS):
        pass
    return perf_counter() - begin


def guard(signal: Any, run: Any, event: h.BatchEnd) -> Timed:
    """Return a timer of what the training loop does where nobody may listen."""

    def timed() -> float:
        begin = perf_counter()
        for _ in range(CALLS):
            if signal.chain:
                signal.emit(run, event)
        return perf_counter() - begin

    return timed


def emit(signal: Any, run: Any, event: h.BatchEnd) -> Timed:
    """Return a timer of `emit` alone."""

    def timed() -> float:
        begin = perf_counter()
        for _ in range(CALLS):
            signal.emit(run, event)
        return perf_counter() - begin

    return timed


def send(signal: Signal, run: Any, event: h.BatchEnd) -> Timed:
    """Return a timer of blinker's own."""

    def timed() -> float:
        begin = perf_counter()
        for _ in range(CALLS):
            signal.send(run, event=event)
        return perf_counter() - begin

    return timed


def plain(handlers: tuple[Any, ...], run: Any, event: h.BatchEnd) -> Timed:
    """Return a timer of the least that calls the handlers."""

    def timed() -> float:
        begin = perf_counter()
        for _ in range(CALLS):
            for handler in handlers:
                handler(run, event=event)
        return perf_counter() - begin

    return timed


def timers() -> dict[str, Timed]:
    """Return what is timed, by what and number of handlers."""
    run, event = Sender(), h.BatchEnd()
    made: dict[str, Timed] = {EMPTY: empty}
    for number in NUMBERS:
        handlers = tuple(idle_handler() for _ in range(number))
        bus, idle, foreign = Bus(), Bus(), Signal()
        for handler in handlers:
            bus.on(h.BatchEnd, handler)
            idle.on(h.BatchEnd, handler, when=h.Every(steps=1_000))
            foreign.connect(handler, weak=False)
        signal = bus.signal(h.BatchEnd)
        made[f"{GUARD} {number}"] = guard(signal, run, event)
        made[f"{EMIT} {number}"] = emit(signal, run, event)
        made[f"{WAIT} {number}"] = emit(idle.signal(h.BatchEnd), run, event)
        made[f"{SEND} {number}"] = send(foreign, run, event)
        made[f"{PLAIN} {number}"] = plain(handlers, run, event)
    return made


def time_dispatch(seed: int) -> dict[str, float]:
    """Return the nanoseconds of one emission, by what and number of handlers."""
    made, shuffle = timers(), random.Random(seed).shuffle
    order = list(made)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(ROUNDS):
        shuffle(order)
        for name in order:
            seconds[name].append(made[name]())
    empty_loop = median(seconds.pop(EMPTY))
    return {name: (median(each) - empty_loop) / CALLS * 1e9 for name, each in seconds.items()}
