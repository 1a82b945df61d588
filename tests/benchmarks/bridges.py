"""What a bridge costs for each call of a callback that does nothing, beside their own loops.

Every number is the least of many short turns, in microseconds, within a running training: python
tests/benchmarks/bridges.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

import heliograph as h
import heliograph.tests.bridges.ignite.quietly
from heliograph.bridges.huggingface import from_huggingface
from heliograph.bridges.ignite import from_ignite
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from ignite.engine import Engine, Events
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

CALLS, TURNS = 200, 300


class Idle(TrainerCallback):
    """Has a method that does nothing."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Do nothing."""


class Turns(h.Plugin):
    """At the end of the third batch, calls a handler over and over, and keeps the least time of a call."""

    def __init__(self, call: Callable[[h.Run], None]) -> None:
        self.call, self.least = call, float("inf")

    @h.on(h.BatchEnd, lane=h.Lane.REPORT)
    def measure(self, run: h.Run, event: h.BatchEnd) -> None:
        """Time the calls."""
        if run.progress.batch == 3:
            self.least = least(lambda: self.call(run))


def least(call: Callable[[], object]) -> float:
    """Return the least time of a call, in microseconds."""
    found = float("inf")
    for _ in range(TURNS):
        begin = perf_counter()
        for _ in range(CALLS):
            call()
        found = min(found, (perf_counter() - begin) / CALLS * 1e6)
    return found


def here(plugin: Any, call: Callable[[h.Run], None]) -> float:
    """Return what a call costs within a training that has the plugin."""
    turns = Turns(call)
    h.Trainer([plugin, turns], device="cpu").fit(linear_classifier(), class_batches(4), optimizer=sgd(), epochs=1)
    return turns.least


def huggingface() -> dict[str, float]:
    """Measure the end of a step."""
    bridged, event = from_huggingface(Idle()), h.BatchEnd()

    def end(run: h.Run) -> None:
        bridged._steps = -1
        bridged.end_batch(run, event)

    make: Any = CallbackHandler
    handler = make([Idle()], None, None, None, None)
    state, control = TrainerState(), TrainerControl()
    return {
        "Hugging Face, on_step_end: here": here(bridged, end),
        "Hugging Face, on_step_end: in CallbackHandler": least(lambda: handler.on_step_end(None, state, control)),
    }


def ignite() -> dict[str, float]:
    """Measure the end of an iteration."""
    bridged, event = from_ignite(lambda engine: None, Events.ITERATION_COMPLETED), h.BatchEnd()
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: None)
    return {
        "Ignite, ITERATION_COMPLETED: here": here(bridged, lambda run: bridged.end_batch(run, event)),
        "Ignite, ITERATION_COMPLETED: in Engine": least(lambda: engine.fire_event(Events.ITERATION_COMPLETED)),
    }


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for name, cost in {**huggingface(), **ignite()}.items():
        print(f"{name:<50} {cost:6.2f} us")
