"""The `Run` of a training in another framework's loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from heliograph import Bus, Plugins
from heliograph.core.context import RunContext
from heliograph.core.data.training_data import TrainingData
from heliograph.core.settings import Settings
from heliograph.events import ResumeFacts
from heliograph.spi import LoopEngine, count
from torch import nn

from .host import HostedControl, HostedSharedControl, HostLoop


@dataclass
class TrainingFacts:
    """The host's description of a training.

    Attributes:
        modules: the trained modules, by name.
        optimizer: the optimizer, an object with `param_groups`; None if the host hides it.
        device: the device.
        epochs: the length in epochs; None without such a limit.
        steps: the length in optimizer steps; None without such a limit.
        batches: micro-batches of this process in an epoch; None if unknown.
        loader: the training loader.
        batch_size: samples in a batch of this process; None if unknown.
        validation: the validation loaders or datasets, by the names of their sets; a single one has the empty name.
        does: the scheduled actions of the loop, out of `log`, `validation` and `save`.
        name: the name of the run, which is part of file names.
        hyper_parameters: a description for loggers.
        world_size: the number of processes.
    """

    modules: Mapping[str, nn.Module]
    optimizer: Any
    device: torch.device
    epochs: int | None = None
    steps: int | None = None
    batches: int | None = None
    loader: Any = None
    batch_size: int | None = None
    validation: Mapping[str, Any] = field(default_factory=dict)
    does: frozenset[str] = frozenset()
    name: str = "run"
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1


class HostedData(TrainingData):
    """The data of a host, which reads them and resumes their position."""

    def __init__(self, facts: TrainingFacts, engine: LoopEngine, host: str, run: Any) -> None:
        super().__init__((), engine, run=run)
        self._facts, self._host = facts, host

    @property
    def batch_size(self) -> int | None:
        return self._facts.batch_size

    def resume_facts(self) -> ResumeFacts:
        untracked = {"data and random generators": f"{self._host} resumes them, which is not verified"}
        return ResumeFacts(untracked, (), "unknown")

    @property
    def train_loader(self) -> Any:
        return self._facts.loader

    @property
    def length(self) -> int | None:
        return self._facts.batches

    def key_draws(self, seed: int, *, probe: bool = True) -> None:
        raise RuntimeError(f"run.data.key_draws is not supported in {self._host}, which reads the data itself.")


class HostedRun(RunContext):
    """One training of a host; see the protocol `heliograph.Run`.

    It has counters, a control, metrics, tracked values, modules and the optimizer. Methods that need
    Heliograph's own loop, such as `state_dict` and `resume`, raise an error.
    """

    boundary_is_open = False  # a state saved while it is True resumes within the boundary

    def __init__(self, facts: TrainingFacts, host: HostLoop, bus: Bus, plugins: Plugins, engine: LoopEngine) -> None:
        optimizer: Any = facts.optimizer or SimpleNamespace(param_groups=[], state={})
        settings = Settings(
            name=facts.name,
            task=SimpleNamespace(**facts.modules),
            evaluations={"validation": facts.validation} if facts.validation else {},
            optimizers={"optimizer": optimizer},
            epochs=facts.epochs,
            steps=facts.steps,
            hyper_parameters=facts.hyper_parameters,
            allow_unused_parameters=True,  # the host decides which parameters it trains
        )
        self.facts, self.host = facts, host
        super().__init__(settings, bus, plugins, engine)
        self.settings = replace(settings, train=(facts.loader,))  # set late, because only the host reads the data
        self.data = HostedData(facts, engine, host.name, self)
        _refuse_forward(self.stepping, host)
        self.control = HostedControl(self.progress) if engine.world_size == 1 else HostedSharedControl(self)
        self.control.host = host
        if facts.optimizer is None:
            self.note(f"{host.name} hides its optimizer: plugins see no parameter groups")

    @cached_property
    def length(self) -> Any:
        return HostedLength(self)

    @property
    def is_complete(self) -> bool:
        return self.progress.steps + self.progress.skipped_steps >= self.last_step or self.has_epochs

    def describe(self) -> str:
        facts, engine = self.facts, self.engine
        processes = "1 process" if engine.world_size == 1 else f"{engine.world_size} processes"
        epochs, steps = facts.epochs, facts.steps
        length = [] if epochs is None else [count(epochs, "epoch", "epochs")]
        length += [] if steps is None else [f"{'at most ' if length else ''}{count(steps, 'step', 'steps')}"]
        lines = [f"run {self.name!r} in {self.host.name}", f"  hardware: {engine.device}, {processes}"]
        lines += [f"  length: {', '.join(length) or 'unknown'}"]
        lines += [f"  {name}: {text}" for name, text in self.plugins.descriptions(self).items()]
        return "\n".join(
            [*lines, *(f"  {note}" for note in self.report.notes), *(f"  WARNING: {w}" for w in self.report.warnings)]
        )

    def state_dict(self, shards: Mapping[str, Any] | None = None, *, weights_only: bool = False) -> dict[str, Any]:
        raise self._refused("state_dict", "checkpoints")

    def resume(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        raise self._refused("resume", "checkpoints")

    def roll_back(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        raise self._refused("roll_back", "roll_back")

    def _refused(self, method: str, word: str) -> RuntimeError:
        return RuntimeError(f"run.{method} is not supported in {self.host.name}. Instead, {self.host.remedy(word)}.")


class HostedLength:
    """`run.length` of a hosted run."""

    scheduler_steps: Mapping[str, int] = MappingProxyType({})
    last_batch = inf

    def __init__(self, run: HostedRun) -> None:
        self._run, facts = run, run.facts
        self.max_epochs, self.max_steps, self.planned_steps = facts.epochs, facts.steps, facts.steps
        self.batches_per_epoch = facts.batches

    @property
    def unknown(self) -> str:
        host = self._run.host
        return "" if self.planned_steps is not None else f"{host.name} does not plan steps: {host.remedy('length')}"

    @property
    def epoch_fraction(self) -> float | None:
        return self._run.progress.epochs_done(self.batches_per_epoch)

    @property
    def fraction(self) -> float | None:
        return self._run.progress.part_done(self.planned_steps, skips=True)


def _refuse_forward(stepping: Any, host: HostLoop) -> None:
    text = f"run.stepping.forward is not supported in {host.name}, which calls its own training step."

    def refuse(*_: object) -> None:
        raise RuntimeError(text)

    kind = type(stepping)
    stepping.__class__ = type(kind.__name__, (kind,), {"forward": property(refuse, refuse)})
