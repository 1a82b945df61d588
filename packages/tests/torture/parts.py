"""The parts of a random program: what an attempt puts together, and where something may be hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph.packages.tests.torture.program import SCHEDULERS, Program
from heliograph.packages.tests.torture.samples import CLASSES, FEATURES, Samples
from heliograph_recorder import Recorder
from heliograph_rules import RuleController
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import default_collate


class Net(nn.Module):
    """Small, with a place for whatever a program may have."""

    def __init__(self, dropout: float, *, norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.norm: nn.Module = nn.BatchNorm1d(2) if norm else nn.Identity()
        self.activation: nn.Module = nn.Tanh()
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.norm(self.first(inputs).unflatten(1, (2, 3))).flatten(1)  # a batch may hold a single sample
        outputs: Tensor = self.last(self.drop(self.activation(values)))
        return outputs


@dataclass
class Parts:
    """What a program is made of, before it is put together.

    Attributes:
        resumes: whether there is a checkpoint to continue from, so that this is another process than the first.
    """

    program: Program
    folder: Path
    resumes: bool
    net: Net
    samples: Samples
    sampler: Any
    collate: Callable[[Any], Any] = default_collate
    model: nn.Module = field(init=False)
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    metrics: dict[str, Any] = field(default_factory=dict)
    task: Callable[..., Any] = h.Supervised
    validation: Any = None
    plugins: dict[str, h.Plugin] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.SGD
    scheduler: Callable[[Any], Any] | None = None
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.net


def scheduler_of(program: Program) -> Callable[[Any], Any] | None:
    """Return what makes a program's scheduler, None where it has none."""
    steps = program.batches
    makers: dict[str, Callable[[Any], Any]] = {
        "StepLR": lambda each: lr_scheduler.StepLR(each, 1, 0.7),
        "ExponentialLR": lambda each: lr_scheduler.ExponentialLR(each, 0.8),
        "CosineAnnealingLR": lambda each: lr_scheduler.CosineAnnealingLR(each, 5),
        "CosineAnnealingWarmRestarts": lambda each: lr_scheduler.CosineAnnealingWarmRestarts(each, 3),
        "OneCycleLR": lambda each: lr_scheduler.OneCycleLR(each, 0.2, total_steps=2 * steps, cycle_momentum=False),
        "LambdaLR": lambda each: lr_scheduler.LambdaLR(each, lambda step: 0.9**step),
        "ReduceLROnPlateau": lambda each: lr_scheduler.ReduceLROnPlateau(each, patience=0, factor=0.5),
        "SequentialLR": lambda each: lr_scheduler.SequentialLR(
            each, [lr_scheduler.LinearLR(each, 0.1, total_iters=4), lr_scheduler.ExponentialLR(each, 0.9)], [4]
        ),
    }
    return None if program.scheduler is None else makers[program.scheduler]


def every(interval: tuple[str, int]) -> h.Every:
    """Return an interval as a filter."""
    counter, number = interval
    return h.Every(**{counter: number})


def built_in(program: Program, folder: Path) -> list[h.Plugin]:
    """Return the plugins of heliograph that a program has."""
    monitor = "validation/loss" if program.validate else "train/loss"
    ends = {"at_start": program.ends, "at_end": program.ends}
    plugins: list[h.Plugin | None] = [
        h.RNGCapture() if program.captured else None,
        h.GradientAccumulation(program.accumulation) if program.accumulation > 1 else None,
        h.GradientClipping(program.clipping) if program.clipping else None,
        h.EMA(0.9, every=program.ema) if program.ema else None,
        {"skip": h.NaNGuard("skip"), "roll back": h.RollBack(9)}.get(program.poison or ""),
        _learning_rate(program.scheduler, monitor),
        h.ValidationSchedule(every(program.validate), **ends) if program.validate else None,
        h.EarlyStopping(monitor, patience=program.patience) if program.patience else None,
        RuleController(rules(program)) if program.rules else None,
        h.LogSchedule(every(program.log), **ends),
        h.SaveSchedule(every(program.save), **ends),
        _checkpoint(program, folder, monitor),
        Recorder(folder / "recordings", losses=True) if program.recorded else None,
    ]
    return [plugin for plugin in plugins if plugin is not None]


def _learning_rate(scheduler: str | None, monitor: str) -> h.Plugin | None:
    if scheduler is None:
        return None
    per: Any = SCHEDULERS[scheduler]
    return h.LearningRate(per, monitor=monitor if per == "plateau" else None)


def _checkpoint(program: Program, folder: Path, monitor: str) -> h.Plugin:
    last, best = program.keeps
    judged = {"keep_best": best, "monitor": monitor} if best else {}
    return h.Checkpoint(folder / "checkpoints", resume="auto", keep_last=last, **judged)  # type: ignore[arg-type]


def rules(program: Program) -> dict[str, Any]:
    """Return a program's rules, as a file would hold them."""
    known: dict[str, tuple[str, str, str]] = {
        "halve": ("on_epoch_begin", "True", "rate.should_scale"),
        "slower": ("on_log", "state.global_step % 3 == 1", "rate.should_scale"),
        "save": ("on_step_end", "state.global_step % 5 == 3", "control.should_save"),
        "worse": ("on_evaluate", "evaluated.eval_loss > 1.0", "rate.should_scale"),
    }
    return {
        "controller_metrics": [
            {"name": "state", "class": "TrainingState"},
            {"name": "evaluated", "class": "EvalMetrics"},
        ],
        "operations": [{"name": "rate", "class": "ScaleLearningRate", "arguments": {"factor": 0.9}}],
        "controllers": [
            {"name": name, "triggers": [trigger], "rule": rule, "operations": [operation]}
            for name, (trigger, rule, operation) in known.items()
            if name in program.rules
        ],
    }
