"""The witness of a random program: it writes down what happens, from the data, the optimizers and the bus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import ref

import heliograph as h
import torch
from torch import Tensor, nn

BATCHES = 450  # in one attempt: more than 100 skipped steps in a row of windows of 3, and than any program needs
EMPTY = 110  # epochs in a row without a batch: after 100, the run raises
Batch = tuple[Tensor, Tensor]
SEEN: tuple[Any, ...] = (
    h.TrainStart, h.BatchStart, h.GradientsReady, h.StepEnd, h.BatchEnd, h.Log, h.ValidationStart,
    h.ValidationBatchEnd, h.ValidationEnd, h.ShouldStop, h.TrainEnd, h.RunFailed, h.RunClosed,
)  # fmt: skip


class Planned(Exception):  # noqa: N818  # that is what it is
    """What a plugin of a program raises."""


class EndlessError(Exception):
    """A run did not end where it had to."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing that happened.

    Attributes:
        what: an event's class, or `read`, `trained`, `stepped`, `asked`, `raised`, `validated`, `measured`, and
            `exported`: what a handler of `TrainEnd` finds.
        name: of the optimizer, the validation set, the verb, the file, or the event that has the metrics.
        by: the plugin that asked or raised.
        number: the epoch, the samples of a batch, or the step of a checkpoint.
        weights: a digest of the weights.
        metrics: those of a log or a validation.
    """

    what: str
    name: str = ""
    by: str = ""
    number: int = 0
    weights: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, which its name ends with."""
    return int(path.stem.rpartition("_")[2])


def digest(modules: Mapping[str, nn.Module]) -> int:
    """Return a number that is another one for other parameters."""
    return digest_of_state({name: module.state_dict() for name, module in modules.items()})


def digest_of_state(states: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Return that number for the saved states of modules."""
    values = [value for _, state in sorted(states.items()) for _, value in sorted(state.items())]
    return hash(b"".join(value.numpy().tobytes() for value in values))


class Notebook:
    """What the witness writes down of one attempt.

    Whatever is part of the training holds a weak reference to it, which a checkpoint does not look into.

    Attributes:
        marks: what happened, in its order.
        weights: of the last step.
        average: what an EMA of the weights must be, computed here; empty before the first step.
        averaged: which parameters have been averaged.
        largest_norm: of the gradients that an optimizer was stepped with.
        schedulers: those that were made, by the names of their optimizers.
    """

    def __init__(self, decay: float | None = None) -> None:
        self.marks: list[Mark] = []
        self.weights = 0
        self.decay = decay
        self.average: dict[int, Tensor] = {}
        self.averaged = set[int]()
        self.largest_norm = 0.0
        self.schedulers: dict[str, Any] = {}
        self.batches = self.empty = 0

    def mark(self, what: str, **facts: Any) -> None:
        """Write down that something happened."""
        self.marks.append(Mark(what, **facts))

    def begin_epoch(self) -> None:
        """End a run whose epochs are empty for ever."""
        self.empty += 1
        if self.empty > EMPTY:
            raise EndlessError(f"{EMPTY} epochs in a row were empty")

    def end_batch(self) -> None:
        """End a run that would train for ever."""
        self.batches, self.empty = self.batches + 1, 0
        if self.batches > BATCHES:
            raise EndlessError(f"{BATCHES} batches were done")

    def watch(self, name: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> None:
        """Write down each step of an optimizer."""
        notebook, parameters = ref(self), [each for group in optimizer.param_groups for each in group["params"]]
        optimizer.register_step_pre_hook(lambda *_: opened(notebook).weigh(parameters))
        optimizer.register_step_post_hook(lambda *_: opened(notebook).step(name, parameters, modules))

    def weigh(self, parameters: list[Tensor]) -> None:
        """Write down the norm of the gradients of a step."""
        norms = [each.grad.norm() for each in parameters if each.grad is not None]
        if norms:
            self.largest_norm = max(self.largest_norm, float(torch.stack(norms).norm()))

    def step(self, name: str, parameters: list[Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Write down a step."""
        self.weights = digest(modules)
        self.mark("stepped", name=name, weights=self.weights)
        if self.decay is not None:
            self._average([each.detach() for module in modules.values() for each in module.parameters()], parameters)

    def _average(self, everything: list[Tensor], stepped: list[Tensor]) -> None:
        if not self.average:
            self.average = {each.data_ptr(): each.clone() for each in everything}
        for each in stepped:
            key = each.data_ptr()
            decay = self.decay if self.decay is not None and key in self.averaged else 0.0
            self.averaged.add(key)
            self.average[key] = self.average[key] * decay + each.detach() * (1 - decay)


def opened(notebook: ref[Notebook]) -> Notebook:
    """Return the notebook that is referred to."""
    found = notebook()
    assert found is not None
    return found


class Batches:
    """Batches that can be read again, without a length."""

    def __init__(self, batches: list[Batch], notebook: ref[Notebook]) -> None:
        self.batches, self.notebook = batches, notebook

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.batches):
            opened(self.notebook).mark("read", number=number)
            yield batch


class SizedBatches(Batches):
    """Batches with a length, which may say more than there are."""

    def __init__(self, batches: list[Batch], notebook: ref[Notebook], length: int) -> None:
        super().__init__(batches, notebook)
        self.length = length

    def __len__(self) -> int:
        return self.length


class ValidationBatches(Batches):
    """The batches of a validation set."""

    def __init__(self, batches: list[Batch], notebook: ref[Notebook], name: str) -> None:
        super().__init__(batches, notebook)
        self.name = name

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            opened(self.notebook).mark("validated", name=self.name)
            yield batch

    def __len__(self) -> int:
        return len(self.batches)


class Witness(h.Plugin):
    """Writes down every event, before other plugins, and metrics and weights as they are after those."""

    affects_training = False
    draws = False

    def __init__(self, notebook: ref[Notebook]) -> None:
        self.notebook = notebook

    @h.on(*SEEN, lane=h.Lane.TRANSFORM)
    def see(self, run: h.Run, event: h.Event) -> None:
        notebook = opened(self.notebook)
        notebook.mark(type(event).__name__)
        if isinstance(event, h.BatchEnd):
            notebook.end_batch()

    @h.on(h.EpochStart, h.EpochEnd, lane=h.Lane.TRANSFORM)
    def see_epoch(self, run: h.Run, event: h.EpochStart | h.EpochEnd) -> None:
        notebook = opened(self.notebook)
        notebook.mark(type(event).__name__, number=event.epoch)
        if isinstance(event, h.EpochStart):
            notebook.begin_epoch()

    @h.on(h.CheckpointLoaded, h.SavePoint, lane=h.Lane.TRANSFORM)
    def see_state(self, run: h.Run, event: h.CheckpointLoaded | h.SavePoint) -> None:
        if isinstance(event, h.CheckpointLoaded):
            opened(self.notebook).weights = digest(run.modules)
        name = str(event.path.name) if isinstance(event, h.CheckpointLoaded) and event.path else ""
        opened(self.notebook).mark(type(event).__name__, name=name, weights=opened(self.notebook).weights)

    @h.on(h.CheckpointSaved, lane=h.Lane.TRANSFORM)
    def see_file(self, run: h.Run, event: h.CheckpointSaved) -> None:
        opened(self.notebook).mark("CheckpointSaved", name=event.path.name, number=step_of(event.path))

    @h.on(h.Log, h.ValidationEnd, lane=h.Lane.REPORT)
    def see_metrics(self, run: h.Run, event: h.Log | h.ValidationEnd) -> None:
        opened(self.notebook).mark("measured", name=type(event).__name__, metrics=dict(event.metrics))

    @h.on(h.TrainEnd)
    def see_end(self, run: h.Run, event: h.TrainEnd) -> None:
        opened(self.notebook).mark("exported", weights=digest(run.modules))
