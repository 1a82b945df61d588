"""A resume whose epochs are of another length: it plans the steps that were done, and those that remain."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    EpochStart,
    Every,
    GradientAccumulation,
    LearningRate,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SaveSchedule,
    StepEnd,
    Trainer,
    on,
    warmup_linear,
)
from heliograph.tests.kit import fit
from heliograph_recorder import replay
from heliograph_recorder.plugin import Recorder
from torch.utils.data import TensorDataset


def dataset(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.arange(size) % 2)


@dataclass
class Seen:
    """What one attempt showed."""

    planned: list[int | None] = field(default_factory=list)
    done: list[float | None] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    fifths: list[int] = field(default_factory=list)
    result: RunResult | None = None


class Looks(Plugin):
    """Notes the plan at the start of each epoch, the rate of each step, and each fifth of the run."""

    affects_training = False

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    @on(EpochStart)
    def note_plan(self, run: Run, event: EpochStart) -> None:
        self.seen.planned.append(run.planned_steps)
        self.seen.done.append(run.fraction)

    @on(StepEnd, before=("learning_rate",))
    def note_rate(self, run: Run, event: StepEnd) -> None:
        self.seen.rates.append(run.optimizer.param_groups[0]["lr"])

    @on(StepEnd, when=Every(fraction=0.2))
    def note_fifth(self, run: Run, event: StepEnd) -> None:
        self.seen.fifths.append(run.progress.steps)


def attempt(
    folder: Path,
    *plugins: Any,
    size: int = 32,
    batch_size: int = 4,
    window: int = 1,
    stop: int = 0,
    scheduler: Any = None,
    **options: Any,
) -> Seen:
    """Train with 8 batches an epoch unless they are others, stopped after a batch; a checkpoint holds the end."""
    seen = Seen()
    saves = SaveSchedule(epochs=100), Checkpoint(folder, resume="auto")
    parts = RNGCapture(), *saves, GradientAccumulation(window), LearningRate("step")
    trainer = Trainer([*parts, *plugins, Looks(seen)], device="cpu")
    if stop:
        trainer.bus.on(
            BatchEnd, lambda run, event: run.control.stop("for now") if run.progress.batches == stop else None
        )
    params: Any = {"batch_size": batch_size, "shuffle": True}
    seen.result = fit(
        trainer,
        train=dataset(size),
        loader_params=params,
        scheduler=warmup_linear(0) if scheduler is None else scheduler,
        **({"epochs": 4} | options),
    )
    return seen


def test_a_replay_knows_the_new_length(tmp_path: Path) -> None:
    attempt(tmp_path / "run", Recorder(tmp_path / "recording"), epochs=2)
    attempt(tmp_path / "run", Recorder(tmp_path / "recording"), limit_train=0.5)
    seen = Seen()

    class Fifths(Plugin):
        @on(StepEnd, when=Every(fraction=0.2))
        def note(self, run: Run, event: StepEnd) -> None:
            seen.fifths.append(run.progress.steps)

    assert not replay(tmp_path / "recording", [Fifths()]).failed
    assert seen.fifths == [4, 7, 10, 13, 16, 20, 24]
