"""Votes beside a loop by hand: in a round of their own, and carried by the gradients.

`CarriedVote` tries how a vote could ride along: a communication hook appends a flag, "this rank has news", to the last
bucket of DDP's gradients. Both ranks receive it in the same step, and a round is spared. For the library it is
not sound:

- The flag leaves with the backward pass, while handlers of GradientsReady, StepEnd and BatchEnd speak after it. Their
  news would be served one step late: a stop, save or validation at another step than in one process, and none after
  the last step, which no backward pass follows. A plain vote must stay for that.
- It is absent where DDP sends no gradients: in a held or skipped batch, in validation, with FSDP, with several losses.
- It is a sum, of the gradients' type. A flag survives that, also in 16 bits; the main rank's clock and the places that
  the ranks compare do not. They would need a round of their own again, or be given up.
- On a GPU the flag lies on the device: to read it is to wait for the device in every step. The vote never does.
- It takes DDP's one place for a hook, which users have for compression; and it copies the last bucket in every step,
  which may hold 25 MiB, or any larger parameter. What that copy takes is measured here too.

`agree_every=10` saves nine tenths of the rounds in all of these cases; news waits for a boundary known beforehand.
"""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

NEWS_AT = 10  # the step in which a rank has news


class Beside(Protocol):
    """What is tried beside the loop by hand."""

    def attach(self, model: DistributedDataParallel) -> None:
        """Take DDP's place for a hook, if need be."""

    def settle(self, step: int) -> None:
        """Do the rest, after each step."""


class Vote:
    """What the library's vote exchanges, by hand."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def attach(self, model: DistributedDataParallel) -> None:
        """Do nothing: it is a round of its own."""

    def settle(self, step: int) -> None:
        """Vote."""
        news = float(step == NEWS_AT and dist.get_rank() == 1)
        votes = torch.tensor([news, 0.0, perf_counter(), step, -step, step, -step], dtype=torch.float64)
        dist.all_reduce(votes, dist.ReduceOp.MAX, self._group)
        check(votes.tolist()[0], step)


class CarriedVote:
    """A vote that rides along with the last bucket of gradients."""

    def __init__(self) -> None:
        self._news, self._received = 0.0, torch.zeros(1)

    def attach(self, model: DistributedDataParallel) -> None:
        """Take DDP's place for a hook."""
        model.register_comm_hook(None, self._exchange)

    def settle(self, step: int) -> None:
        """Read what the backward pass brought, and cast the flag for the next one."""
        check(self._received.item(), step)
        self._news = float(step + 1 == NEWS_AT and dist.get_rank() == 1)

    # Without annotations: torch checks them, and does not understand them as text.
    def _exchange(self, state, bucket):  # type: ignore[no-untyped-def]
        gradients = bucket.buffer().div_(dist.get_world_size())
        if bucket.is_last():
            gradients = torch.cat([gradients, gradients.new_tensor([self._news])])
        future = dist.all_reduce(gradients, async_op=True).get_future()
        return future.then(self._parted if bucket.is_last() else whole)

    def _parted(self, future: Future[list[Tensor]]) -> Tensor:
        gradients = whole(future)
        self._received = gradients[-1:]
        return gradients[:-1]


class Averaging:
    """A hook that does what DDP does without one: what a hook costs by itself."""

    def attach(self, model: DistributedDataParallel) -> None:
        """Take DDP's place for a hook."""
        model.register_comm_hook(dist.group.WORLD, allreduce_hook)

    def settle(self, step: int) -> None:
        """Do nothing."""


def whole(future: Future[list[Tensor]]) -> Tensor:
    """Return the bucket that was exchanged."""
    return future.value()[0]


def check(news: float, step: int) -> None:
    """Raise unless both ranks learn of news in the step in which one of them has some, and in no other."""
    if bool(news) != (step == NEWS_AT):
        raise AssertionError(f"news {news} in step {step}")
