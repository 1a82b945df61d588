"""Losses that are sums over tokens, each with its count: a window is as one batch of all its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from heliograph import At, DeviceEngine, Every, GradientAccumulation, Plugin, Run, RunResult, StepEnd, Task, Trainer, on
from heliograph.tests import kit
from heliograph.tests.kit import Batch
from heliograph_recorder import Recorder, replay
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LEFT_OUT = -100
COUNTS = [1, 8, 2, 7, 3, 3, 8, 1, 5, 4]  # of windows of four, the last is of two
SGD = kit.sgd(0.5, momentum=0.9)
Form = Literal["pair", "number", "weighed"]


def token_batches(counts: Sequence[int] = COUNTS) -> list[Batch]:
    """Return batches of eight samples, of which so many have a target; the same every time."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for count in counts:
        targets = torch.full((8,), LEFT_OUT)
        targets[:count] = torch.randint(0, 3, (count,), generator=generator)
        made.append((torch.randn(8, 4, generator=generator), targets))
    return made


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Tokens(Task):
    """A task whose loss is a sum over tokens.

    Args:
        form: returns a pair with a tensor or a number, or weighs the mean.
        times: by how much the loss and its count are larger.
    """

    def __init__(self, form: Form = "pair", times: int = 1) -> None:
        self.model, self.form, self.times = model(), form, times

    def training_step(self, run: Run, batch: Batch) -> Any:
        inputs, targets = batch
        total = cross_entropy(self.model(inputs), targets, reduction="sum") * self.times
        count = (targets != LEFT_OUT).sum() * self.times
        if self.form == "pair":
            return total, count
        if self.form == "number":
            return total, count.item()
        run.weigh(count)
        return total / count

    def validation_step(self, run: Run, batch: Batch) -> Any:
        return self.training_step(run, batch)


def fit(*plugins: Any, task: Any = None, engine: Any = None, **options: Any) -> tuple[RunResult, list[Tensor]]:
    """Train for an epoch of the token batches; return the result and the weights."""
    mine = task or Tokens()
    options = {"train": token_batches(), "optimizer": SGD, "epochs": 1, **options}
    result = Trainer(plugins, engine=engine or DeviceEngine("cpu")).fit(mine, options.pop("train"), **options)
    return result, [each.detach() for each in mine.model.parameters()]


# A window is as one batch.


# On a device, whose counts are read once a step.


# On several ranks.


# What is logged.


# Counters, resume, replay.


class Seen(Plugin):
    """Writes down how many tokens there were at each step, and where two filters let a step through."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.every: list[int] = []
        self.at: list[int] = []

    @on(StepEnd)
    def count(self, run: Run, event: StepEnd) -> None:
        self.tokens.append(run.progress.tokens)

    @on(StepEnd, when=Every(tokens=20))
    def pass_every(self, run: Run, event: StepEnd) -> None:
        self.every.append(run.progress.tokens)

    @on(StepEnd, when=At(tokens=[5, 30]))
    def pass_at(self, run: Run, event: StepEnd) -> None:
        self.at.append(run.progress.tokens)


def test_a_replay_counts_the_tokens(tmp_path: Path) -> None:
    seen, again = Seen(), Seen()
    result, _ = fit(GradientAccumulation(2), seen, Recorder(tmp_path), epochs=2)
    assert result.recording is not None
    replay(result.recording, [again])
    assert (again.tokens, again.every, again.at) == (seen.tokens, seen.every, seen.at)
    assert again.tokens[-1] == 2 * sum(COUNTS)


# A loop of one's own.


# What is refused.


class Returns(Tokens):
    """Returns something that depends on the loss."""

    def __init__(self, make: Callable[[Run, Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def training_step(self, run: Run, batch: Batch) -> Any:
        total, _ = super().training_step(run, batch)
        return self.make(run, total)


def weighed(run: Run, count: Any, result: Any) -> Any:
    run.weigh(count)
    return result
