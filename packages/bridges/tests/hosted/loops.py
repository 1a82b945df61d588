"""A loop of another framework, as small as one can be, that plugins are hosted in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from heliograph import Event, Plugin, Run, RunResult, on
from heliograph.events import CATALOGUE
from heliograph.tests.kit import Batch, class_batches
from heliograph_bridges.hosted.host import HostLoop
from heliograph_bridges.hosted.run import TrainingFacts
from heliograph_bridges.hosted.saved import capture
from heliograph_bridges.hosted.training import HostedTraining
from torch import nn

HOST = HostLoop("other.Trainer", frozenset({"skip_step", "veto_stop"}))


class Trace(Plugin):
    """Keeps the names of the events, but for quiet ones."""

    policy = "observer"
    quiet: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.names: list[str] = []

    @on(*CATALOGUE, optional=True)
    def keep(self, run: Run, event: Event) -> None:
        if event.name not in self.quiet:
            self.names.append(event.name)

    @property
    def text(self) -> str:
        return " ".join(self.names)


class Loop:
    """Trains a linear model with SGD; validates and saves where a plugin asks for it.

    Args:
        plugins: what is hosted.
        host: what the loop can do.
        facts: what else it says of its training.
    """

    def __init__(self, *plugins: Any, host: HostLoop = HOST, **facts: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.training = HostedTraining(plugins, host)
        self.facts = facts
        self.saved: list[dict[str, Any]] = []

    def fit(
        self,
        batches: Iterable[Batch] | None = None,
        *,
        epochs: int = 1,
        saved: Mapping[str, Any] | None = None,
        losses: Mapping[int, float] | None = None,
    ) -> RunResult:
        """Train; `losses` replaces those of some batches, by their number."""
        given = class_batches(2) if batches is None else list(batches)
        facts = TrainingFacts(
            {"model": self.model}, self.optimizer, torch.device("cpu"), epochs=epochs, batches=len(given)
        )
        for name, value in {"validation": {"": given}, **self.facts}.items():
            setattr(facts, name, value)
        training, leave = self.training, self.training.begin(facts, saved, None if saved is None else Path("there"))
        for epoch in range(training.active.progress.epoch, epochs):
            if leave.stop:
                break
            training.begin_epoch(epoch)
            for number, (inputs, targets) in enumerate(given):
                training.begin_batch((inputs, targets))
                loss = nn.functional.cross_entropy(self.model(inputs), targets)
                shown = torch.tensor((losses or {}).get(number, loss.item()))
                training.end_forward(shown)
                torch.autograd.backward(loss)
                training.end_backward(shown)
                if not training.begin_step():
                    self.optimizer.step()
                self.optimizer.zero_grad()
                training.end_step()
                training.end_batch()
                leave = self.serve()
                if leave.stop or leave.end_epoch:
                    break
            if training.end_epoch(is_over=not (leave.stop or leave.end_epoch)):
                leave = self.serve()
        return training.end()

    def serve(self) -> Any:
        """Do what is due."""
        training = self.training
        due = training.open_boundary()
        if "log" in due:
            training.log({"train/loss": 1.0})
        if "validation" in due:
            training.begin_validation(1)
            training.begin_validation_batch(None)
            training.end_validation_batch()
            training.end_validation({"validation/loss": 0.5})
        if "save" in due:
            self.saved.append(capture(training.active))
            training.save(Path(f"checkpoint-{training.active.progress.steps}"))
        return training.close_boundary()
