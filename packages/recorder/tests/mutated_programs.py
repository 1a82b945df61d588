"""Small random programs, each with one thing changed from some batch on: for tests of `diverge`."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph_recorder import Digests, FirstDifference, Recorder
from heliograph_recorder.divergence.compare import Kind
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, FEATURES = 40, 5
Mutation = str
KINDS: dict[Mutation, tuple[Kind, ...]] = {
    "sample": ("data",),
    "draw": ("draw",),
    "rate": ("learning_rate",),
    "operator": ("loss",),
    "backward operator": ("gradients",),
    "skip_step": ("request",),
    "skip_batch": ("request",),
    "validation": ("request",),
    "order": ("data",),
}


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        seed: everything random in it is chosen by this.
        mutation: what is changed, None for nothing.
    """

    seed: int
    mutation: Mutation | None = None

    def mutated(self, mutation: Mutation) -> Program:
        """Return it with something changed."""
        return replace(self, mutation=mutation)


class Truth:
    """Where the change acts for the first time: the epoch and the batch, and the steps before it."""

    def __init__(self) -> None:
        self.place: tuple[int, int] | None = None
        self.steps = 0

    def note(self, run: h.Run) -> None:
        """Note the batch in hand, if it is the first one."""
        if self.place is None:
            self.place = run.progress.epoch, run.progress.batch + run.data.in_hand
            self.steps = run.progress.steps

    def is_found(self, difference: FirstDifference) -> bool:
        """Return whether a difference is there; gradients are compared once their window is complete."""
        if difference.kind == "gradients":
            return difference.step == self.steps + 1
        return (difference.epoch, difference.batch) == self.place


class TwistedBackward(torch.autograd.Function):
    """Does nothing forward, and scales gradients backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # torch's own
        """Return a copy."""
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Scale."""
        return gradient * 1.001


class MutatedTask(h.Supervised):
    """A task whose step is changed in one batch."""

    def __init__(self, model: nn.Module, mutation: Mutation | None, at: int, truth: Truth) -> None:
        super().__init__(model, functional.mse_loss)
        self.mutation, self.at, self.truth = mutation, at, truth

    def training_step(self, run: h.Run, batch: Any) -> Any:  # any batch
        """Compute the loss."""
        x, y, number = batch
        if self.mutation in ("sample", "order") and bool((number == self.at % SAMPLES).any()):
            self.truth.note(run)
        out = self.model(x)
        if run.progress.batches == self.at:
            if self.mutation == "draw":
                random.Random(self.at).choice([lambda: torch.rand(1), random.random])()
                self.truth.note(run)
            if self.mutation == "operator":
                out = out * 1.001
                self.truth.note(run)
            if self.mutation == "backward operator":
                out = TwistedBackward.apply(out)  # type: ignore[no-untyped-call]  # torch's own
                self.truth.note(run)
        return functional.mse_loss(out, y)


class Mutator(h.Plugin):
    """Asks for something, or changes the learning rate, in one batch."""

    asks = ("skip_batch", "skip_step", "validation")

    def __init__(self, mutation: Mutation | None, at: int, truth: Truth) -> None:
        self.mutation, self.at, self.truth = mutation, at, truth

    @h.on(h.BatchStart)
    def skip(self, run: h.Run, event: h.BatchStart) -> None:
        """Skip the batch."""
        if self.mutation == "skip_batch" and run.progress.batches == self.at:
            run.control.skip_batch("a mutation")
            self.truth.note(run)

    @h.on(h.GradientsReady)
    def change(self, run: h.Run, event: h.GradientsReady) -> None:
        """Change the rate, or skip the step."""
        if run.progress.batches < self.at or self.truth.place is not None:
            return
        if self.mutation == "rate":
            run.optimizer.param_groups[0]["lr"] *= 0.99
            self.truth.note(run)
        if self.mutation == "skip_step":
            run.control.skip_step("a mutation")
            self.truth.note(run)

    @h.on(h.BatchEnd)
    def ask(self, run: h.Run, event: h.BatchEnd) -> None:
        """Ask for a validation."""
        if self.mutation == "validation" and run.progress.batches == self.at:
            run.control.request_validation("a mutation")
            self.truth.note(run)


def make(
    program: Program, folder: Path, truth: Truth | None = None, *, order: int = 0, workers: int = 0, **options: Any
) -> tuple[h.Trainer, dict[str, Any]]:
    """Return the trainer of a program, which writes to a folder, and the keywords of its `fit`.

    Args:
        program: the program.
        folder: for the recording and the checkpoints.
        truth: notes where its change acts.
        order: of the samples, by this seed; 0 for that of the program.
        workers: of the loader.
        options: of `fit`.
    """
    choice, truth = random.Random(program.seed), truth or Truth()
    torch.manual_seed(program.seed)
    at = choice.randrange(3, 15)
    x, y, number = torch.randn(SAMPLES, FEATURES), torch.randn(SAMPLES, 1), torch.arange(SAMPLES)
    if program.mutation == "sample":
        x[at % SAMPLES, at % FEATURES] += 1e-3
    mutation, size = program.mutation, choice.choice([4, 8, 10])
    layers: list[nn.Module] = [nn.Linear(FEATURES, 8), choice.choice([nn.ReLU, nn.Tanh])()]
    layers += [nn.Dropout(0.2)] * choice.randrange(2) + [nn.BatchNorm1d(8)] * choice.randrange(2)
    task = MutatedTask(nn.Sequential(*layers, nn.Linear(8, 1)), mutation, at, truth)
    optimizer = choice.choice([torch.optim.SGD, torch.optim.AdamW])(task.model.parameters(), lr=0.01)
    plugins: list[Any] = [h.RNGCapture(program.seed), Mutator(mutation, at, truth), h.ValidationSchedule(epochs=1)]
    plugins += [h.GradientAccumulation(2)] * choice.randrange(2) + [h.GradientClipping(0.5)] * choice.randrange(2)
    scheduler = choice.choice([None, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)])
    plugins += [h.LearningRate("step")] * (scheduler is not None)
    data = TensorDataset(x, y, number)
    if order:
        permutation = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(order))
        data = TensorDataset(*(each[permutation] for each in data.tensors))
    saving = [h.SaveSchedule(steps=choice.randrange(2, 7)), h.Checkpoint(folder, keep_last=None)]
    recorder = Recorder(folder, digests=Digests(gradients=1, weights=1))
    loader = DataLoader(
        data, batch_size=size, shuffle=choice.random() < 0.5, num_workers=workers, persistent_workers=bool(workers)
    )
    return h.Trainer([*plugins, *saving, recorder], device="cpu"), {
        "task": task,
        "train": loader,
        "validation": [(x[:4], y[:4])],
        "optimizer": optimizer,
        "scheduler": scheduler,
        "epochs": 4,
        **options,
    }


def train(program: Program, folder: Path, **options: Any) -> tuple[Path, Truth]:
    """Train a program; return its recording, and where its change acted."""
    truth = Truth()
    trainer, made = make(program, folder, truth, **options)
    result = trainer.fit(**made)
    assert result.recording is not None
    return result.recording, truth
