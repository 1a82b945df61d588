"""What a log costs with each tracker: its handlers in the loop, and the rest of the process from one log to the next.

Both in processor time, which hardly depends on what else runs on the machine. The rest is the thread of the tracker: it
takes the interpreter from the loop for as long at most.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from time import process_time, thread_time

import heliograph as h
import torch
from heliograph.packages.tests.benchmarks.harness import batches_of, sgd, tiny_model
from heliograph.packages.tests.benchmarks.usual import LOG
from heliograph.spi import Tracker
from heliograph_trackers import CSVLog, MLflow, Trackio, WandB
from torch.nn.functional import mse_loss

STEPS, ROUNDS = 2_500, 2
NONE = "no tracker"
HANDLERS, OTHERS = "handlers", "others"
MAKERS: dict[str, Callable[[Path], Tracker | None]] = {
    NONE: lambda folder: None,
    "TensorBoard": lambda folder: h.TensorBoard(folder / "tensorboard"),
    "CSVLog": lambda folder: CSVLog(folder / "log.csv"),
    "MLflow, SQLite": lambda folder: MLflow("benchmark", f"sqlite:///{folder / 'mlflow.db'}"),
    "WandB, offline": lambda folder: WandB(mode="offline", folder=folder),
    "Trackio": lambda folder: Trackio("benchmark"),
}


class Clock(h.Plugin):
    """Times the handlers of each log that come between its own two, and what other threads do from log to log.

    Args:
        tracker: the one that is measured, which opens its page before the first of these times; None for none.
    """

    policy = "observer"

    def __init__(self, tracker: Tracker | None) -> None:
        self._tracker = tracker
        self.handlers: list[float] = []  # microseconds
        self.others: list[float] = []
        self._begun = 0.0
        self._known: float | None = None

    @h.on(h.Log, lane=h.Lane.TRANSFORM)
    def begin(self, run: h.Run, event: h.Log) -> None:
        """Begin before those of a tracker."""
        if self._known is not None:
            self.others.append((process_time() - thread_time() - self._known) * 1e6)
        self._begun = thread_time()

    @h.on(h.Log, lane=h.Lane.REPORT)
    def end(self, run: h.Run, event: h.Log) -> None:
        """End after those of a tracker, which is before this in the list."""
        self.handlers.append((thread_time() - self._begun) * 1e6)
        while self._tracker is not None and (self._tracker._outbox is None or self._tracker._outbox.opened is None):
            Event().wait(0.01)
        self._known = process_time() - thread_time()


def per_log(seed: int) -> dict[str, dict[str, list[float]]]:
    """Return the microseconds of the handlers of each log, and those of other threads from log to log, by tracker."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    batches = batches_of(STEPS)
    order, shuffle = list(MAKERS), random.Random(seed).shuffle
    found: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in MAKERS} for kind in (HANDLERS, OTHERS)}
    with TemporaryDirectory() as name, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        os.environ["TRACKIO_DIR"] = name  # before it is imported
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # which a machine without network would wait for
        for _ in range(ROUNDS):
            shuffle(order)
            for kind in order:
                tracker = MAKERS[kind](Path(name))
                clock = Clock(tracker)
                plugins = [h.LogSchedule(h.Every(steps=LOG)), *([tracker] if tracker else []), clock]
                task = h.Supervised(tiny_model(), mse_loss)
                result = h.Trainer(plugins, device="cpu").fit(task, batches, optimizer=sgd, epochs=1)
                assert not result.warnings, result.warnings
                found[HANDLERS][kind] += clock.handlers
                found[OTHERS][kind] += clock.others
    return found
