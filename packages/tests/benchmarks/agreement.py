"""What two gloo ranks cost in every step, beside torch's DDP in a loop by hand.

All loops take the same steps with the same model and batches, in turns: one after another in the same two processes,
in shuffled order, which is the same on both ranks. In the end their weights must be equal, bit for bit. A step is timed
from the beginning of its forward pass to that of the next one's.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory, mkdtemp
from time import perf_counter
from typing import Any
from unittest.mock import patch

import heliograph as h
import torch
import torch.distributed as dist
from heliograph.packages.tests.benchmarks.harness import Batch, batches_of, sgd, tiny_model
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

HAND, CONTROL = "DDP by hand", "DDP by hand, once more (control)"
VOTE = "by hand, and a blocking vote by gloo"
OURS, USUAL = "heliograph", "heliograph, the usual set"
GLOO, GLOO_USUAL = "heliograph, as on several machines", "heliograph, usual, as on several machines"
JUDGED = "heliograph, 1 handler of ShouldStop"
VARIANTS = (HAND, CONTROL, VOTE, OURS, USUAL, JUDGED, GLOO, GLOO_USUAL)
RANKS = 2
ROUNDS, STEPS, WARM_UP = 6, 220, 20
LOG = 50

Turn = Callable[[list[float]], nn.Module]
Spent = dict[str, list[list[float]]]  # microseconds by name, turn and step


class Task(h.Task):
    """Notes the time of every step."""

    def __init__(self, times: list[float]) -> None:
        self.model, self.times = tiny_model(), times

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        """Return the loss."""
        self.times.append(perf_counter())
        inputs, targets = batch
        return mse_loss(self.model(inputs), targets)

    def validation_step(self, run: h.Run, batch: Any) -> Tensor:
        """Return the loss."""
        inputs, targets = batch
        return mse_loss(self.model(inputs), targets)


def by_hand(batches: Sequence[Batch], votes: bool, times: list[float]) -> nn.Module:
    """Train as one does with DDP and without a framework."""
    model = DistributedDataParallel(tiny_model())
    optimizer = sgd(model.parameters())
    for step, (inputs, targets) in enumerate(batches):
        times.append(perf_counter())
        loss = mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
        optimizer.step()
        optimizer.zero_grad()
        if votes:
            vote = torch.tensor([0.0, perf_counter(), step, -step], dtype=torch.float64)
            dist.all_reduce(vote, dist.ReduceOp.MAX)
            assert vote[0].item() == 0.0
    inner: nn.Module = model.module
    return inner


def fit(
    batches: Sequence[Batch],
    engine: h.DDPEngine,
    plugins: Callable[[], Sequence[h.Plugin]],
    times: list[float],
) -> nn.Module:
    """Train with heliograph, which deals the batches out itself."""
    task = Task(times)
    given = plugins()
    validation = batches[:4] if any(isinstance(each, h.ValidationSchedule) for each in given) else None
    h.Trainer(given, engine=engine).fit(task, batches, validation=validation, optimizer=sgd, epochs=1)
    return task.model


class Judge(h.Plugin):
    """Has a last word at every boundary, and says nothing."""

    @h.on(h.ShouldStop)
    def judge(self, run: h.Run, event: h.ShouldStop) -> None:
        """Do nothing."""


def usual(folder: Path) -> list[h.Plugin]:
    """Return the usual set; its validations and saves, every 1,000 steps, are too rare for the 99th percentile."""
    place = mkdtemp(dir=folder) if dist.get_rank() == 0 else None
    shared: list[Any] = [place]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    return [
        h.ProgressBar(plain=False, file=Path(os.devnull).open("w")),
        h.LogSchedule(h.Every(steps=LOG)),
        h.TensorBoard(folder),
        h.EarlyStopping(patience=10_000),
        h.ValidationSchedule(h.Every(steps=1_000)),
        h.SaveSchedule(h.Every(steps=1_000)),
        h.Checkpoint(folder, keep_last=1),
    ]


def time_ranks(seed: int) -> Spent:
    """Return the microseconds of each step of each round on the first rank."""
    with TemporaryDirectory() as folder:
        spent: Spent = h.launch(race, seed, Path(folder), nprocs=RANKS)[0]
    return spent


def race(seed: int, folder: Path) -> Spent:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=RANKS)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.callback(gc.collect)  # wrappers are in cycles, and must not outlive the group
        spent = in_turns(variants(stack, folder), random.Random(seed).shuffle)
        dist.barrier()
    return spent


def variants(stack: ExitStack, folder: Path) -> dict[str, Turn]:
    """Return what is raced, by name."""
    batches = batches_of(RANKS * STEPS)
    mine = batches[dist.get_rank() :: RANKS]
    engine, remote = h.DDPEngine("gloo", device="cpu"), h.DDPEngine("gloo", device="cpu")
    stack.enter_context(engine.process())
    with patch("heliograph.core.distributed.group.open_board", return_value=None):  # as on several machines
        stack.enter_context(remote.process())
    return {
        HAND: partial(by_hand, mine, False),
        CONTROL: partial(by_hand, mine, False),
        VOTE: partial(by_hand, mine, True),
        OURS: partial(fit, batches, engine, list),
        USUAL: partial(fit, batches, engine, partial(usual, folder)),
        JUDGED: partial(fit, batches, engine, lambda: [Judge()]),
        GLOO: partial(fit, batches, remote, list),
        GLOO_USUAL: partial(fit, batches, remote, partial(usual, folder)),
    }


def in_turns(turns: dict[str, Turn], shuffle: Callable[[list[str]], None]) -> Spent:
    """Return the microseconds of each step, the first ones of each turn left out."""
    names = list(turns)
    spent: Spent = {name: [] for name in names}
    ends: list[list[Tensor]] = []
    for index in range(ROUNDS + 1):
        shuffle(names)
        for name in names:
            torch.manual_seed(0)
            times: list[float] = []
            ends.append([each.detach() for each in turns[name](times).parameters()])
            steps = [(end - begin) * 1e6 for begin, end in pairwise(times)]
            if index:
                spent[name].append(steps[WARM_UP:])
        if not index:
            gc.collect()
            gc.freeze()
    assert all(all(map(torch.equal, each, ends[0])) for each in ends), "the loops did not train alike"
    return spent


def in_tens(spent: Spent, name: str) -> list[float]:
    """Return for each turn the median over its means of ten steps."""
    return [median(fmean(turn[end - 10 : end]) for end in range(10, len(turn) + 1, 10)) for turn in spent[name]]
