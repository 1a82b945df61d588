"""What agreement costs two gloo ranks in every step, beside torch's DDP in a loop by hand.

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
from statistics import fmean, median
from time import perf_counter
from typing import Any

import heliograph as h
import torch
import torch.distributed as dist
from heliograph.tests.benchmarks.harness import Batch, batches_of, sgd, tiny_model
from heliograph.tests.benchmarks.votes import Averaging, Beside, CarriedVote, Vote
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

HAND, CONTROL = "DDP by hand", "DDP by hand, once more (control)"
VOTE, HOOK, CARRIED = "by hand, and a blocking vote", "by hand, a hook that only averages", "by hand, a hook that votes"
OURS, SELDOM = "heliograph", "heliograph, agree_every=10"
BATCH_END, GRADIENTS = "heliograph, 1 handler of BatchEnd", "heliograph, 1 handler of GradientsReady"
VARIANTS = (HAND, CONTROL, VOTE, HOOK, CARRIED, OURS, SELDOM, BATCH_END, GRADIENTS)
COPY = "the copy of a bucket of 25 MiB"
RANKS = 2
ROUNDS, STEPS, WARM_UP = 6, 120, 20
BUCKET = 25 * 2**20 // 4  # floats

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


def by_hand(batches: Sequence[Batch], beside: Beside | None, times: list[float]) -> nn.Module:
    """Train as one does with DDP and without a framework."""
    model = DistributedDataParallel(tiny_model())
    optimizer = sgd(model.parameters())
    if beside is not None:
        beside.attach(model)
    for step, (inputs, targets) in enumerate(batches):
        times.append(perf_counter())
        loss = mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
        optimizer.step()
        optimizer.zero_grad()
        if beside is not None:
            beside.settle(step)
    inner: nn.Module = model.module
    return inner


def fit(batches: Sequence[Batch], engine: h.DDPEngine, event: type[h.Event] | None, times: list[float]) -> nn.Module:
    """Train with heliograph, which deals the batches out itself."""
    trainer, task = h.Trainer(engine=engine), Task(times)
    if event is not None:
        trainer.bus.on(event, ignore)
    trainer.fit(task, batches, optimizer=sgd, epochs=1)
    return task.model


def ignore(run: h.Run, event: h.Event) -> None:
    """Do nothing."""


def time_ranks(seed: int) -> Spent:
    """Return the microseconds of each step of each round on the first rank."""
    spent: Spent = h.launch(race, seed, nprocs=RANKS)[0]
    return spent


def race(seed: int) -> Spent:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=RANKS)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.callback(gc.collect)  # wrappers are in cycles, and must not outlive the group
        spent = in_turns(variants(stack), random.Random(seed).shuffle)
        dist.barrier()
    return {**spent, COPY: [copies()]}


def variants(stack: ExitStack) -> dict[str, Turn]:
    """Return what is raced, by name."""
    batches = batches_of(RANKS * STEPS)
    mine = batches[dist.get_rank() :: RANKS]
    always, seldom = h.DDPEngine("gloo", device="cpu"), h.DDPEngine("gloo", device="cpu", agree_every=10)
    for engine in (always, seldom):
        stack.enter_context(engine.process())
    return {
        HAND: partial(by_hand, mine, None),
        CONTROL: partial(by_hand, mine, None),
        VOTE: partial(by_hand, mine, Vote()),
        HOOK: partial(by_hand, mine, Averaging()),
        CARRIED: partial(by_hand, mine, CarriedVote()),
        OURS: partial(fit, batches, always, None),
        SELDOM: partial(fit, batches, seldom, None),
        BATCH_END: partial(fit, batches, always, h.BatchEnd),
        GRADIENTS: partial(fit, batches, always, h.GradientsReady),
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


def copies() -> list[float]:
    """Return the microseconds of appending a flag to a full bucket."""
    bucket, flag, spent = torch.ones(BUCKET), torch.zeros(1), []
    for _ in range(20):
        begin = perf_counter()
        torch.cat([bucket, flag])
        spent.append((perf_counter() - begin) * 1e6)
    return spent


def in_tens(spent: Spent, name: str) -> list[float]:
    """Return for each turn the median over its means of ten steps; some loops vote in every tenth."""
    return [median(fmean(turn[end - 10 : end]) for end in range(10, len(turn) + 1, 10)) for turn in spent[name]]
