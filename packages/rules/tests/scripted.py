"""Trainings whose losses and metrics are what a script says, so that it is known when a rule must be true."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import heliograph as h
import torch
import yaml
from heliograph_rules.base import RuleFired
from heliograph_rules.controller import RuleController
from torch import Tensor, nn

STOP = "hfcontrols.should_training_stop"
LOSS = {"name": "training_loss", "class": "Loss"}
STATE = {"name": "trainer_state", "class": "TrainingState"}
EVAL = {"name": "evalmetric", "class": "EvalMetrics"}


class Scripted(h.Task):
    """Every batch has the next of `losses` (the last one continues), every validation the next of `validation`."""

    def __init__(self, losses: Sequence[float] = (1.0,), validation: Sequence[float] = (1.0,)) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.losses, self.validation = losses, validation

    def training_step(self, run: h.Run, batch: Tensor) -> Tensor:
        value = self.losses[min(run.progress.batches, len(self.losses) - 1)]
        outputs: Tensor = self.model(batch)
        return outputs.mean() * 0 + value

    def validation_step(self, run: h.Run, batch: Tensor) -> dict[str, float]:
        return {"loss": self.validation[min(run.progress.validations, len(self.validation) - 1)]}

    test_step = validation_step


class Fired(h.Plugin):
    """Keeps (controller, trigger, epoch, batches, steps) of every rule that acts."""

    affects_training = False

    def __init__(self) -> None:
        self.acts: list[tuple[str, str, int, int, int]] = []

    @h.on(RuleFired)
    def keep(self, run: h.Run, event: RuleFired) -> None:
        place = run.progress
        self.acts.append((event.controller, event.trigger, place.epoch, place.batches, place.steps))

    def steps(self) -> list[int]:
        return [steps for *_, steps in self.acts]


def controller(
    rule: str | bool,
    *,
    name: str = "it",
    triggers: Sequence[str] = ("on_log",),
    operations: Sequence[str] = (STOP,),
    **more: Any,
) -> dict[str, Any]:
    """Return one controller, as in a file."""
    return {"name": name, "triggers": list(triggers), "rule": rule, "operations": list(operations), **more}


def rules(
    *controllers: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]] = (LOSS, STATE, EVAL),
    operations: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return what a file would hold."""
    return {
        "controller_metrics": list(metrics),
        "operations": list(operations),
        "controllers": [dict(each) for each in controllers],
    }


def train(
    source: Any,
    *plugins: Any,
    losses: Sequence[float] = (1.0,),
    validation: Sequence[float] | None = None,
    batches: int = 4,
    epochs: int = 2,
    logs: int | None = 1,
    given: Mapping[str, Any] | None = None,
    **options: Any,
) -> h.RunResult:
    """Train with rules.

    Args:
        source: what a `RuleController` takes, or one.
        plugins: further ones.
        losses: of the batches.
        validation: the losses of the validations, one at the end of every epoch; None validates nothing.
        batches: in an epoch.
        epochs: how many.
        logs: every how many batches; None never.
        given: further arguments of the `RuleController`.
        options: further arguments of `fit`.
    """
    rule_controller = source if isinstance(source, RuleController) else RuleController(source, **(given or {}))
    schedules: list[Any] = [] if logs is None else [h.LogSchedule(h.Every(batches=logs))]
    if validation is not None:
        schedules.append(h.ValidationSchedule(h.Every(epochs=1)))
        options["validation"] = data(1)
    task = Scripted(losses, validation or (1.0,))
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    trainer = h.Trainer([*schedules, *plugins, rule_controller], device="cpu")
    return trainer.fit(task, data(batches), optimizer=optimizer, epochs=epochs, **options)


def data(batches: int) -> list[Tensor]:
    """Return batches of two samples."""
    return [torch.ones(2, 3) for _ in range(batches)]


def asked(result: h.RunResult, by: str = "rule_controller") -> list[tuple[str, int, int]]:
    """Return (verb, epoch, step) of what somebody asked for."""
    return [(each.verb, each.epoch, each.step) for each in result.history if each.by == by]


def lines(records: Iterable[Any]) -> list[str]:
    """Return what was logged, without the place."""
    return [record.getMessage() for record in records]


def written(folder: Path, source: Any) -> Path:
    """Write rules, or the text of them, and return where they are."""
    path = folder / "rules.yaml"
    path.write_text(source if isinstance(source, str) else yaml.safe_dump(source, sort_keys=False), encoding="utf-8")
    return path
