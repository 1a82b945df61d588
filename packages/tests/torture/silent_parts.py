"""What a random program is made of: its task, its data, its optimizers, its plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import heliograph as h
import torch
from heliograph.packages.tests.torture.silent_program import Deed, Keeps, Program, Timing
from heliograph.packages.tests.torture.silent_witness import (
    Batch,
    Batches,
    Notebook,
    Planned,
    SizedBatches,
    ValidationBatches,
    Witness,
    opened,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler

FEATURES = 3
VALIDATION = 2  # batches of a set
RATE = 0.1
ERRORS = {"Planned": Planned, "StopIteration": StopIteration, "KeyError": KeyError}
mse = nn.functional.mse_loss


class Net(nn.Module):
    """A linear model that may have parameters which are frozen, or of no use."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)
        if program.is_unused:
            self.unused = nn.Parameter(torch.ones(2))
        self.linear.bias.requires_grad_(not program.is_frozen)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs)
        return outputs


class Task:
    """Trains one model."""

    def __init__(self, program: Program, notebook: ref[Notebook]) -> None:
        self.model, self.notebook = Net(program), notebook
        self.is_poisoned = program.poison == "gradients"

    def training_step(self, run: h.Run, batch: Batch) -> Any:
        opened(self.notebook).mark("trained", number=len(batch[0]))
        loss = mse(self.model(batch[0]), batch[1])
        if self.is_poisoned:
            loss = loss + (self.model.linear.weight.sum() * 0).sqrt()  # zero, and its gradient is 0 times infinity
        return loss

    def validation_step(self, run: h.Run, batch: Batch) -> Tensor:
        return mse(self.model(batch[0]), batch[1])

    test_step = validation_step


class NamedTask:
    """Trains two models, each with an optimizer and a loss of its own."""

    def __init__(self, program: Program, notebook: ref[Notebook]) -> None:
        self.generator, self.discriminator, self.notebook = Net(program), Net(program), notebook

    def training_step(self, run: h.Run, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        opened(self.notebook).mark("trained", number=len(batch[0]))
        yield "generator", mse(self.generator(batch[0]), batch[1])
        yield "discriminator", mse(self.discriminator(batch[0]), -batch[1])

    def validation_step(self, run: h.Run, batch: Batch) -> Tensor:
        return mse(self.generator(batch[0]), batch[1])

    test_step = validation_step


def modules_of(task: Any) -> dict[str, nn.Module]:
    """Return the modules of a task, by name."""
    return {name: value for name, value in vars(task).items() if isinstance(value, nn.Module)}


def task_of(program: Program, notebook: ref[Notebook], seed: int) -> Any:
    """Return a program's task with the weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (NamedTask if program.is_named else Task)(program, notebook)


def random_batches(count: int, seed: int) -> list[Batch]:
    """Return batches of 2 to 4 samples."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, FEATURES, generator=generator), torch.randn(size, 1, generator=generator))
        for size in (2 + (number + seed) % 3 for number in range(count))
    ]


def training_data(program: Program, notebook: ref[Notebook]) -> Any:
    """Return what a program trains on."""
    batches = random_batches(program.whole, program.seed)
    if program.poison == "a batch":
        batches[program.seed % program.whole][0].fill_(torch.nan)
    if program.data == "one-shot":
        return iter(Batches(batches, notebook))
    if program.data == "list":
        return batches
    if program.data == "unsized":
        return Batches(batches, notebook)
    return SizedBatches(batches, notebook, program.batches)


def validation_data(program: Program, notebook: ref[Notebook]) -> Any:
    """Return a program's validation sets, None where it has none."""
    sets = {
        name: ValidationBatches(random_batches(VALIDATION, 1 + number), notebook, name)
        for number, name in enumerate(program.sets)
    }
    return (sets if len(sets) > 1 else sets.get("")) or None


def scheduler_of(program: Program, optimizer: Any) -> Any:
    """Return the scheduler of one of a program's optimizers."""
    if program.rate == "plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    return lr_scheduler.StepLR(optimizer, 2, 0.9)


def plugins_of(program: Program, folder: Path, witness: Witness, *, resumes: bool) -> list[Any]:
    """Return the plugins of a program, the witness first."""
    plugins: list[Any] = [
        h.RNGCapture() if program.is_captured else None,
        h.GradientAccumulation(program.accumulation) if program.accumulation > 1 else None,
        h.GradientClipping(program.clipping) if program.clipping else None,
        h.EMA(program.decay, load_at_end=program.loads_average) if program.decay else None,
        h.NaNGuard("skip", max_skips=program.guard) if program.guard else None,
        h.LearningRate(program.rate, monitor=program.plateau) if program.rate else None,
        *(_schedule(timing) for timing in program.timings),
        _early_stopping(program.stops_early) if program.stops_early else None,
        *(doer(deed, number, witness) for number, deed in enumerate(program.deeds)),
        *(_checkpoint(program.keeps, folder, resumes=resumes) if program.keeps else ()),
        h.JsonlLog(folder / "log.jsonl") if program.is_logged else None,
    ]
    return [witness, *(plugin for plugin in plugins if plugin is not None)]


def _schedule(timing: Timing) -> h.Plugin:
    kind: Any = {"log": h.LogSchedule, "validation": h.ValidationSchedule, "save": h.SaveSchedule}[timing.what]
    ends = {} if timing.at_end is None else {"at_end": timing.at_end}
    counts: Any = timing.counts if timing.kind == "At" else timing.counts[0]
    plugin: h.Plugin = kind(getattr(h, timing.kind)(**{timing.counter: counts}), at_start=timing.at_start, **ends)
    return plugin


def _early_stopping(given: tuple[str, int, float]) -> h.Plugin:
    monitor, patience, min_delta = given
    return h.EarlyStopping(monitor, patience=patience, min_delta=min_delta, mode="min")


def _checkpoint(keeps: Keeps, folder: Path, *, resumes: bool) -> Iterator[h.Plugin]:
    judged: dict[str, Any] = {"keep_best": keeps.best, "monitor": keeps.monitor, "mode": "min"} if keeps.best else {}
    resume = "auto" if resumes else None
    yield h.Checkpoint(
        folder / "checkpoints", keep_last=keeps.last, background=keeps.background, resume=resume, **judged
    )
    if keeps.metadata is not None:
        yield h.CheckpointLabel(keeps.metadata)
    if keeps.load_best is not None:
        yield h.LoadBest(keeps.load_best)


class Doer(h.Plugin):
    """Does something at every n-th emission of an event, and lets the witness know."""

    def __init__(self, deed: Deed, witness: Witness) -> None:
        self.deed, self.witness = deed, witness
        self.count = deed.every - deed.first
        if deed.verb in ("stop", "validation", "save", "log", "skip_batch", "skip_step"):
            self.asks = (deed.verb,)
        if deed.is_observer:
            self.policy = "observer"

    def reset(self) -> None:
        self.count = self.deed.every - self.deed.first

    def do(self, run: h.Run, event: Any) -> None:
        self.count += 1
        verb = self.deed.verb
        if self.count % self.deed.every or verb == "listen":
            return
        if verb == "raise":
            opened(self.witness.notebook).mark("raised", name=self.deed.error, by=self.name)
            raise ERRORS[self.deed.error]("as planned")
        name = f"request_{verb}" if verb in ("save", "validation", "log") else verb
        getattr(run.control, name)("it is time")
        opened(self.witness.notebook).mark("asked", name=verb, by=self.name)


def doer(deed: Deed, number: int, witness: Witness) -> h.Plugin:
    """Return a plugin that does a deed."""

    def received(self: Any, run: h.Run, event: h.Event) -> None:
        self.do(run, event)

    kind = type("Doer", (Doer,), {"received": h.on(getattr(h, deed.at))(received)})
    plugin: h.Plugin = kind(deed, witness).named(name_of(deed, number))
    return plugin


def name_of(deed: Deed, number: int) -> str:
    """Return the name of the plugin that does a deed."""
    return f"does_{deed.verb}_{number}"


@dataclass(frozen=True)
class Parts:
    """What one attempt is made of."""

    task: Any
    train: Any
    validation: Any
    optimizer: Any
    scheduler: Any


def parts_of(program: Program, notebook: Notebook, seed: int) -> Parts:
    """Return the parts of an attempt, whose steps are written down."""
    pen = ref(notebook)
    task = task_of(program, pen, seed)
    modules = modules_of(task)

    def made(name: str) -> Callable[[Any], torch.optim.Optimizer]:
        def make(parameters: Any) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(parameters, lr=RATE)
            notebook.watch(name, optimizer, modules)
            return optimizer

        return make

    def scheduled(name: str) -> Callable[[Any], Any]:
        def make(optimizer: Any) -> Any:
            scheduler = notebook.schedulers[name] = scheduler_of(program, optimizer)
            return scheduler

        return make

    makers = {name: made(name) for name in program.optimizers}
    schedulers = {name: scheduled(name) for name in program.optimizers} if program.rate else {}
    return Parts(
        task,
        training_data(program, pen),
        validation_data(program, pen),
        makers if program.is_named else makers[""],
        schedulers if program.is_named and program.rate else schedulers.get(""),
    )
