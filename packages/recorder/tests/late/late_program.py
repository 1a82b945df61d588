"""A training whose checkpoints are evaluated when chosen steps end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import heliograph as h
from heliograph.spi import read_manifest
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph_recorder import LateResults
from heliograph_recorder.late.command import Evaluator

ACCURACY = {1: 0.5, 2: 0.8, 3: 0.7, 4: 0.6, 5: 0.4, 6: 0.3, 7: 0.2, 8: 0.1}


def score(checkpoint: Path) -> dict[str, float]:
    """Return an accuracy that depends on the steps of a checkpoint."""
    return {"accuracy": ACCURACY[int(read_manifest(checkpoint).progress["steps"])]}


def evaluate_all(folder: Path) -> list[str]:
    return [evaluation.checkpoint for evaluation in Evaluator(folder, "late_program:score", score).look()]


class EvaluateAt(h.Plugin):
    """Evaluates the checkpoints at chosen steps, so that the results arrive there."""

    affects_training = False

    def __init__(self, folder: Path, steps: Collection[int]) -> None:
        self._folder, self._steps = folder, steps

    @h.on(h.StepEnd)
    def evaluate(self, run: h.Run, event: h.StepEnd) -> None:
        if run.engine.is_main and run.progress.steps in self._steps:
            evaluate_all(self._folder)


class LateTrace(h.Plugin):
    """Records at which step each result was read: `(read at, steps of the checkpoint, accuracy)`."""

    affects_training = False

    def __init__(self, path: Path | None = None, kill_at: int = 0) -> None:
        self.read: list[list[float]] = []
        self._path, self._kill_at = path, kill_at

    @h.on(h.LateResult, lane=h.Lane.REPORT, optional=True)
    def note(self, run: h.Run, event: h.LateResult) -> None:
        self.read.append([run.progress.steps, event.steps, event.metrics["late/accuracy"]])
        if self._path is not None:
            self._path.write_text(json.dumps(self.read))
        if self._kill_at == run.progress.steps:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path, *plugins: h.Plugin, at: Collection[int] = range(1, 9), steps: int = 8, **options: Any
) -> tuple[h.RunResult, list[list[float]]]:
    """Train with a checkpoint after each of 8 steps; return the result, and what was read."""
    trace = next((plugin for plugin in plugins if isinstance(plugin, LateTrace)), None) or LateTrace()
    options = {"keep_last": None, "resume": "auto", **options}
    saving = h.Checkpoint(folder, every=h.Every(steps=1), **options)
    late = next((plugin for plugin in plugins if isinstance(plugin, LateResults)), None) or LateResults(folder)
    others = [plugin for plugin in plugins if plugin not in (trace, late)]
    trainer = h.Trainer([h.RNGCapture(), EvaluateAt(folder, at), trace, late, *others, saving], device="cpu")
    result = trainer.fit(linear_classifier(), class_batches(4), optimizer=sgd(), steps=steps)
    return result, trace.read


def train_until(kill_at: int, folder: Path, path: Path) -> None:
    """Train with early stopping, and write what was read; at 0, the process is not killed."""
    stopping = h.EarlyStopping("late/accuracy", mode="max", patience=3)
    train(folder, LateTrace(path, kill_at), stopping, at=(2, 3, 5, 6))
