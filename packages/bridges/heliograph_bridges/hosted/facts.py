"""What a host says of a training when it begins, and the data and modules of it as plugins see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from heliograph.core.data.training_data import TrainingData
from heliograph.events import ResumeFacts
from heliograph.spi import LoopEngine
from torch import nn


@dataclass
class Facts:
    """A training, as its host describes it.

    Attributes:
        modules: what is trained, by name.
        optimizer: what steps it; anything with `param_groups`, or None where the host does not show it.
        device: where it computes.
        epochs: the length in epochs, None where it has no such limit.
        steps: the length in optimizer steps, None where it has no such limit.
        batches: micro-batches of this process in an epoch, None where that is unknown.
        loader: what they are read from.
        batch_size: samples in a batch of this process, None where that is unknown.
        validation: the validation loaders or datasets, by the names of their sets; a single one has the empty name.
        does: what the loop does without being asked, of `log`, `validation` and `save`.
        name: the name of the run, as in file names.
        hyper_parameters: a description for loggers.
        world_size: how many processes the host trains with.
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


class HostedTask:
    """The task of a run whose steps are the host's: the modules are its attributes.

    Args:
        modules: by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        vars(self).update(modules)


class HiddenOptimizer:
    """Stands for an optimizer that the host does not show: it has no parameter groups that anybody could read."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = {}


class HostedData(TrainingData):
    """The data of a host, which reads them, and finds their position in a resume.

    Args:
        facts: what the host says of them.
        engine: connects the ranks.
        host: the name of the host.
        run: the run.
    """

    def __init__(self, facts: Facts, engine: LoopEngine, host: str, run: Any) -> None:
        super().__init__((), engine, run=run)
        self._facts, self._host = facts, host

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch of this process."""
        return self._facts.batch_size

    def resume_facts(self) -> ResumeFacts:
        """Return that data and generators are the host's."""
        untracked = {"data and random generators": f"{self._host} resumes them itself, and nothing here checks it"}
        return ResumeFacts(untracked, (), "unknown")

    @property
    def train_loader(self) -> Any:
        """What the host reads."""
        return self._facts.loader

    @property
    def length(self) -> int | None:
        """The micro-batches in an epoch; None if they are unknown."""
        return self._facts.batches

    def key_draws(self, seed: int, *, probe: bool = True) -> None:
        """Raise RuntimeError: the draws of the data are the host's."""
        raise RuntimeError(f"run.data.key_draws cannot be served in {self._host}, which reads the data itself.")
