"""What trainings that trackers show go through: metrics of all kinds, a roll back, a kill."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph.spi import Tracker
from heliograph.tests.kills import in_a_child
from heliograph.tests.kit import Batch, class_batches, fit, saving


class Noisy(h.Plugin):
    """Logs further metrics, from a step on."""

    ranks = "main"

    def __init__(self, metrics: Mapping[str, float] | None = None, *, since: int = 1) -> None:
        self.since = since
        self.metrics = metrics or {"a": math.nan, "b": math.inf, "c, quoted": -math.inf, "epoch": 7.0}

    @h.on(h.Log, lane=h.Lane.MEASURE)
    def add(self, run: h.Run, event: h.Log) -> None:
        if run.progress.steps >= self.since:
            event.metrics.update(self.metrics)


class Show(h.Plugin):
    """Shows more than numbers."""

    @h.on(h.StepEnd)
    def show(self, run: h.Run, event: h.StepEnd) -> None:
        run.log_image("it/sees", torch.ones(3, 2, 4))
        run.log_text("says", f"step {run.progress.steps}")


class Die(h.Plugin):
    """Kills the process at a step, when its tracker has written what was logged, after so many loads of checkpoints."""

    affects_training = False

    def __init__(self, tracker: Tracker, step: int, loads: int = 0) -> None:
        self.tracker, self.step, self.loads = tracker, step, loads
        self.loaded = 0

    @h.on(h.CheckpointLoaded)
    def count(self, run: h.Run, event: h.CheckpointLoaded) -> None:
        self.loaded += 1

    @h.on(h.StepEnd, lane=h.Lane.REPORT)
    def die(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == self.step and self.loaded == self.loads:
            assert self.tracker._outbox is not None
            self.tracker._outbox.drain()
            os.kill(os.getpid(), signal.SIGKILL)


def spoiled(count: int, at: int) -> list[Batch]:
    """Return batches, of which one has inputs that are not numbers."""
    batches = class_batches(count)
    batches[at] = (torch.full_like(batches[at][0], math.nan), batches[at][1])
    return batches


def train(folder: Path, tracker: Tracker, *plugins: Any, steps: int = 4, every: int = 2, **options: Any) -> h.RunResult:
    """Train, with a log at each step and checkpoints in a folder, of which the newest is resumed."""
    return fit(
        h.LogSchedule(h.Every(steps=1)),
        tracker,
        *saving(folder / "checkpoints", h.Every(steps=every), resume="auto"),
        *plugins,
        **{"train": class_batches(steps), "epochs": 1, **options},
    )


def killed(act: Callable[[], object]) -> None:
    """Train in a child, which kills itself."""
    in_a_child(act, killed=True, about="a training")
