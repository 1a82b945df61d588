"""The run that plugins are given in the loop of a host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from heliograph import Bus, Control, Plugins
from heliograph.core.context import RunContext
from heliograph.core.settings import Settings
from heliograph.spi import LoopEngine, count

from .control import HostedControl
from .facts import Facts, HiddenOptimizer, HostedData, HostedTask
from .host import Host


class HostedRun(RunContext):
    """One training of a host; the protocol `heliograph.Run` documents it.

    It has what every run has: counters, a control, metrics, tracked values, modules and the optimizer. What only our
    own loop can do, such as to take its whole state or to continue from another one, raises.

    Args:
        facts: what the host says of the training.
        host: whose loop it is.
        bus: the bus.
        plugins: the plugins.
        engine: the hardware, in the process of the host.
    """

    boundary_is_open = False  # what is saved meanwhile continues within it

    def __init__(self, facts: Facts, host: Host, bus: Bus, plugins: Plugins, engine: LoopEngine) -> None:
        optimizer: Any = HiddenOptimizer() if facts.optimizer is None else facts.optimizer
        settings = Settings(
            name=facts.name,
            task=HostedTask(facts.modules),
            evaluations={"validation": facts.validation} if facts.validation else {},
            optimizers={"optimizer": optimizer},
            epochs=facts.epochs,
            steps=facts.steps,
            hyper_parameters=facts.hyper_parameters,
            allow_unused_parameters=True,  # which of them are trained is the host's affair
        )
        self.facts, self.host = facts, host
        super().__init__(settings, bus, plugins, engine)
        self.settings = replace(settings, train=(facts.loader,))  # only now: the data are read by the host
        self.data = HostedData(facts, engine, host.name, self)
        _refuse_forward(self.stepping, host)
        self.control = self._make_control()
        if facts.optimizer is None:
            self.note(f"{host.name} does not show its optimizer: plugins see no parameter groups")

    @cached_property
    def length(self) -> Any:
        """The length that the host plans."""
        return HostedLength(self)

    @property
    def has_epochs(self) -> bool:
        """Whether the epochs are done."""
        return self.facts.epochs is not None and self.progress.epoch >= self.facts.epochs

    @property
    def is_complete(self) -> bool:
        """Whether the length is reached: the host counts a step whose gradients were dropped, too."""
        done = self.progress.steps + self.progress.skipped_steps
        return (self.facts.steps is not None and done >= self.facts.steps) or self.has_epochs

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Return a context for the handlers of `TrainStart`, within which a plugin can isolate observers."""
        with self.isolating():
            yield

    def describe(self) -> str:
        """Return what will happen, in a few lines."""
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
        """Raise RuntimeError: the host saves weights and optimizers."""
        raise self._refused("state_dict", "checkpoints")

    def resume(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """Raise RuntimeError: the host resumes."""
        raise self._refused("resume", "checkpoints")

    def roll_back(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """Raise RuntimeError: the host cannot go back."""
        raise self._refused("roll_back", "roll_back")

    def _refused(self, method: str, word: str) -> RuntimeError:
        return RuntimeError(f"run.{method} cannot be served in {self.host.name}. Instead, {self.host.mend(word)}.")

    def _make_control(self) -> Control:
        if self.engine.world_size == 1:
            return HostedControl(self.progress, self.host)
        from .ranks import HostedSharedControl

        return HostedSharedControl(self, self.host)


class HostedLength:
    """`run.length` of a hosted run: what the host says of it.

    Args:
        run: the run.
    """

    scheduler_steps: Mapping[str, int] = MappingProxyType({})
    last_batch = inf

    def __init__(self, run: HostedRun) -> None:
        self._run, facts = run, run.facts
        self.max_epochs, self.max_steps, self.planned_steps = facts.epochs, facts.steps, facts.steps
        self.batches_per_epoch = facts.batches

    @property
    def unknown(self) -> str:
        """Why the number of steps is not known, and how to change that; empty if it is known."""
        host = self._run.host
        return "" if self.planned_steps is not None else f"{host.name} does not say it: {host.mend('length')}"

    @property
    def epoch_fraction(self) -> float | None:
        """How many epochs are done."""
        return self._run.progress.epochs_done(self.batches_per_epoch)

    @property
    def fraction(self) -> float | None:
        """Which part of the planned steps is done."""
        return self._run.progress.part_done(self.planned_steps, skips=True)


def _refuse_forward(stepping: Any, host: Host) -> None:
    """Let `run.stepping.forward` be an error: the host has the training step, and would not call another."""
    text = f"The training step is {host.name}'s: run.stepping.forward is that of heliograph's own loop."

    def refuse(*_: object) -> None:
        raise RuntimeError(text)

    kind = type(stepping)
    stepping.__class__ = type(kind.__name__, (kind,), {"forward": property(refuse, refuse)})
