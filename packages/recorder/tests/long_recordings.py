"""Recordings of very many batches, with their losses and a log every 50 of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from heliograph.events import Request
from heliograph.packages.recorder.tests.recordings import attempt, encode, encode_attempt
from heliograph_recorder.format.lines import ROWS, encode_head
from heliograph_recorder.format.records import Batches, Counters, Entry, EventEntry, RequestEntry

LOG = 50  # batches from one log to the next


def write_long(path: Path, batches: int) -> None:
    """Write a recording."""
    with path.open("w") as file:
        file.write(f"{encode_head()}\n{encode_attempt(attempt(losses=True))}\n")
        file.writelines(f"{encode(entry)}\n" for entry in entries(batches))


def entries(batches: int) -> Iterator[Entry]:
    """Yield the entries of a long run."""
    random, counters, logs = np.random.default_rng(0), Counters(), 0
    yield EventEntry("train_start", 0.0, counters)
    yield EventEntry("epoch_start", 0.01, counters, {"epoch": 0, "resumed": False, "batches": batches})
    for begin in range(0, batches, ROWS):
        count = min(ROWS, batches - begin)
        steps = np.arange(begin + 1, begin + count + 1)
        clock = np.maximum.accumulate((steps * 0.5 + random.integers(0, 2, count)).astype(int))
        losses = (2 / np.sqrt(1 + steps / 1000) + random.normal(0, 0.1, count)).astype("f4").astype("f8")
        none, numbers, samples, times = ((steps * 0).tolist(), steps.tolist(), (steps * 32).tolist(), clock.tolist())
        block = Batches(counters, clock[-1] / 100, times, numbers, none, none, samples, none, none, losses.tolist())
        counters = block.last
        yield block
        for step in range(begin, begin + count, LOG):
            reason = f"every {LOG} steps"
            yield RequestEntry(logs, Request("log", "log_schedule", reason, 0, step, step, 1, None, "batch_end"))
            metrics = {"train/loss": 2 / (1 + step / 1000) ** 0.5, "train/accuracy": step / batches, "train/lr": 0.1}
            at = Counters(batch=step, steps=step, samples=step * 32, seconds=step * 0.005)
            yield EventEntry("log", step * 0.005, at, {"metrics": metrics, "asked": [logs]})
            logs += 1
