"""Many tensors in few collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .exchange import Exchange, plain_bytes

BYTES = 25 * 2**20  # of one collective, as in torch's DistributedDataParallel


@torch.no_grad()
def broadcast_tensors(group: Exchange, tensors: Iterable[Tensor], name: str) -> None:
    """Make tensors equal to rank 0's, in place. Every rank must call it, with tensors of the same shapes and types.

    Args:
        group: the ranks.
        tensors: of any types.
        name: what this exchange is called in reports.
    """
    with group.collective(name):
        for bucket in _buckets(tensors):
            flat = torch.cat([each.reshape(-1) for each in bucket])
            group.spread(plain_bytes(flat))
            if group.rank:
                parts = torch.split(flat, [each.numel() for each in bucket])
                torch._foreach_copy_(bucket, [part.view_as(each) for each, part in zip(bucket, parts, strict=True)])


@torch.no_grad()
def average_gradients(group: Exchange, parameters: Sequence[Tensor], name: str) -> None:
    """Average the gradients of parameters over all ranks, in place, just as torch's DistributedDataParallel does.

    A parameter without a gradient on some ranks counts as zero there; one that has none on any rank is left without.

    Args:
        group: the ranks.
        parameters: the same on every rank.
        name: what this exchange is called in reports.

    Raises:
        TypeError: a gradient is sparse.
    """
    with group.collective(name):
        group.meet(name, sum(each.numel() for each in parameters))
        for bucket in _buckets(parameters):
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
            if any(each.is_sparse for each in gradients):
                raise TypeError(
                    "A sparse gradient (of an embedding with sparse=True, say) cannot be averaged here: only with one "
                    "loss per step."
                )
            lacking = [index for index, each in enumerate(bucket) if each.grad is None]
            present = gradients[0].new_ones(len(bucket))
            for index in lacking:
                present[index] = 0.0
            flat = torch.cat([*(each.reshape(-1) for each in gradients), present]).mul_(1.0 / group.world_size)
            group.add_up(flat)
            *averages, present = torch.split(flat, [*(each.numel() for each in gradients), len(bucket)])
            for each, average in zip(bucket, averages, strict=True):
                if each.grad is not None:
                    each.grad.copy_(average.view_as(each))
            for index in lacking:
                if present[index]:  # another rank has one; this waits for the device
                    bucket[index].grad = averages[index].view_as(bucket[index]).clone()


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one type and device, of limited size together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in tensors:
        kinds.setdefault((each.dtype, each.device), []).append(each)
    for kind in kinds.values():
        bucket, size = [kind[0]], kind[0].nbytes
        for each in kind[1:]:
            if size + each.nbytes > BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(each)
            size += each.nbytes
        yield bucket
