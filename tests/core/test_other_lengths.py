"""A resume whose epochs are of another length: it plans the steps that were done, and those that remain."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    EpochStart,
    Every,
    GradientAccumulation,
    LearningRate,
    LogSchedule,
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
from heliograph.tests.messages import assert_facts
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
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
        self.seen.planned.append(run.length.planned_steps)
        self.seen.done.append(run.length.fraction)

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


@pytest.mark.parametrize(
    ("first", "then", "steps"),
    [
        ({"epochs": 2}, {"limit_train": 0.5}, 16 + 8),
        ({"epochs": 1}, {"size": 20}, 8 + 15),
        ({"epochs": 1.5}, {"batch_size": 2}, 12 + 40),
        ({"epochs": 2}, {"batch_size": 8}, 16 + 8),
        ({"stop": 6}, {"limit_train": 4}, 6 + 12),
        ({"limit_train": 2, "epochs": 2}, {}, 4 + 16),
        ({"epochs": 2}, {"window": 2}, 16 + 8),
        ({"steps": 12, "epochs": None}, {"limit_train": 2}, 12 + 4),
        ({"epochs": 2}, {"limit_train": 0.5, "steps": 20}, 20),
    ],
    ids=["limit", "data", "batch", "batch at an epoch", "within", "no limit", "window", "from steps", "steps end it"],
)
def test_the_steps_that_remain_are_planned(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], steps: int
) -> None:
    attempt(tmp_path, **first)
    seen = attempt(tmp_path, **then)
    assert seen.result is not None
    assert set(seen.planned) == {steps}
    assert seen.result.progress.steps == steps
    done = steps - len(seen.rates)
    assert seen.done[0] == done / steps
    assert seen.rates == pytest.approx([0.1 * (steps - each) / steps for each in range(done, steps)])
    assert seen.fifths == [each for each in _fifths(steps) if each > done]
    assert seen.result.warnings == ()


def _fifths(steps: int) -> list[int]:
    return [-(-each * steps // 5) for each in range(1, 6)]


def test_the_new_plan_is_kept_in_further_resumes(tmp_path: Path) -> None:
    attempt(tmp_path, epochs=2)
    attempt(tmp_path, limit_train=0.5, stop=19)
    seen = attempt(tmp_path, limit_train=0.5)
    assert set(seen.planned) == {24}
    assert seen.result is not None
    assert "from step" not in "".join(seen.result.notes)
    assert set(attempt(tmp_path, epochs=6).planned) == {16 + 8 + 16}


def test_a_resume_in_epochs_of_the_same_length_plans_what_it_planned_though_one_ended_early(tmp_path: Path) -> None:
    def attempts(name: str, *stops: int) -> list[float]:
        rates: list[float] = []
        for stop in (*stops, 0):
            ends = Ends()
            rates += attempt(tmp_path / name, ends, stop=stop).rates
        return rates

    class Ends(Plugin):
        @on(BatchEnd)
        def end(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == 3:
                run.control.end_epoch("the third batch")

    assert attempts("parts", 2, 5, 12) == attempts("whole")


def test_a_scheduler_that_keeps_its_length_is_warned_of(tmp_path: Path) -> None:
    def scheduler(optimizer: torch.optim.Optimizer, steps: int) -> CosineAnnealingLR:
        return CosineAnnealingLR(optimizer, steps)

    attempt(tmp_path, epochs=2, scheduler=scheduler)
    seen = attempt(tmp_path, limit_train=0.5, scheduler=scheduler)
    assert seen.result is not None
    assert_facts(seen.result.warnings[0], "CosineAnnealingLR", "16 steps", "24")


def test_a_function_that_a_scheduler_keeps_has_the_new_length(tmp_path: Path) -> None:
    def scheduler(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
        return LambdaLR(optimizer, lambda done: 1 - done / steps)

    attempt(tmp_path, epochs=2, scheduler=scheduler)
    rates = attempt(tmp_path, limit_train=0.5, scheduler=scheduler).rates
    assert rates[1:] == pytest.approx([0.1 * (24 - done) / 24 for done in range(17, 24)])  # the first was saved


def test_a_schedule_by_fractions_counts_the_new_length(tmp_path: Path) -> None:
    attempt(tmp_path, LogSchedule(fraction=0.25), epochs=2)
    seen = attempt(tmp_path, LogSchedule(fraction=0.25), limit_train=0.5)
    assert seen.result is not None
    assert [row["step"] for row in seen.result.log_history] == [4, 8, 12, 16, 18, 24]


def test_nothing_is_said_of_what_the_program_did_not_change(tmp_path: Path) -> None:
    for options in ({"epochs": 2}, {"epochs": 3}, {"limit_train": 0.5}):
        seen = attempt(tmp_path, scheduler=warmup_linear(0.1), **options)
    assert seen.result is not None
    assert [note for note in seen.result.notes if "in the program" in note] == []
