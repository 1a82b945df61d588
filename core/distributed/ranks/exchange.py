"""The collectives of a group of processes: reduce, gather, broadcast, barrier, vote."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from numbers import Real
from struct import Struct
from typing import Any, NoReturn, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from ....events.engine import Reduction

NAMED = 64  # bytes of a collective's name that the others get
KIND = Struct(f"<{NAMED}sIq")  # what every collective begins with: its name, a checksum of that, and its size
LENGTH = 8  # bytes


def check_reducible(value: Any, how: Reduction) -> None:
    """Raise ValueError where there is no such reduction, TypeError where a value cannot be reduced by it."""
    if how not in ("sum", "mean", "max"):
        raise ValueError(
            f"reduce(value, how) takes 'sum', 'mean' or 'max', got {how!r}. For the values of all ranks, there is "
            f"gather, or gather_objects."
        )
    if not isinstance(value, Tensor | Real):
        raise TypeError(f"reduce takes a tensor or a number, got {type(value).__name__}.")
    if how == "mean" and isinstance(value, Tensor) and not _is_exact(value):
        raise TypeError(f"A tensor of {value.dtype} has no mean: reduce(value.float(), 'mean').")


def reduce_alone(value: Any, how: Reduction) -> Any:
    """Return what `Exchange.reduce` gives on one rank: a new tensor, or a number."""
    check_reducible(value, how)
    if isinstance(value, Tensor):
        widens = how == "sum" and not _is_exact(value)
        return value.detach().to(torch.int64 if widens else value.dtype, copy=True)
    return value / 1 if how == "mean" else sum([value]) if how == "sum" else value


def check_gathered(tensor: Any) -> None:
    """Raise TypeError unless it is a tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"gather takes a tensor, got {type(tensor).__name__}: for others there is gather_objects.")


def check_source(source: int, world_size: int) -> None:
    """Raise ValueError where there is no such rank."""
    if not 0 <= source < world_size:
        raise ValueError(f"broadcast from rank {source}: ranks count from 0 to {world_size - 1}.")


def _is_exact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class Rounds(Protocol):
    """How each rank of a group gets a message of every other one, round by round.

    At most 3 rounds are posted and not collected.

    Attributes:
        capacity: the bytes of a message at most.
    """

    capacity: int

    def post(self, message: bytes) -> None:
        """Post this rank's message of the next round, without a wait."""

    def ready(self) -> list[bytes] | None:
        """Return the messages of the oldest round that is not collected, by rank; None where one is missing yet."""

    def collect(self) -> list[bytes]:
        """Return the messages of the oldest round that is not collected, by rank.

        Raises:
            RuntimeError: a rank has left or died, or did not come in time.
        """

    def close(self) -> None:
        """Keep nothing open."""


class Collective:
    """A context that shows in which collective this rank is; no generator, as there is one in every step.

    Args:
        exchange: of which group.
        name: of the collective.
    """

    __slots__ = ("_before", "_began", "_exchange", "_name")

    def __init__(self, exchange: Exchange, name: str) -> None:
        self._exchange, self._name = exchange, name

    def __enter__(self) -> None:
        if self._exchange.refusal is not None:
            self._exchange.refuse(self._name)
        self._before, self._began = self._exchange.waiting_in, time.monotonic()
        self._exchange.waiting_in = self._name, self._began

    def __exit__(self, *_: object) -> None:
        self._exchange.waiting_in = self._before
        if self._before is None:
            self._exchange.waited_seconds += time.monotonic() - self._began


class Exchange:
    """The collectives of a group, by name. Every rank must call them, in one order.

    Tensors on the device travel by `backend`. Numbers, objects and tensors on the CPU have a gloo group of their own:
    they never wait for the device, and never get between gradients.

    Args:
        rank: this process among `world_size`, from 0.
        world_size: how many processes there are.
        backend: `gloo` or `nccl`, for gradients and for tensors on the device.
        device: where this process computes.

    Attributes:
        tensors: the torch process group for gradients and tensors on the device.
        control: that for all else.
        rounds: how the collectives find each other, and summaries travel.
        waited_seconds: how long this process was in collectives so far.
        waiting_in: the name of the collective that is under way, with `time.monotonic()` of its beginning; else None.
        refusal: the plugin and the event of the handler that runs on some ranks only, if one does.
    """

    tensors: ProcessGroup
    control: ProcessGroup
    rounds: Rounds

    def __init__(self, rank: int, world_size: int, backend: str, device: torch.device) -> None:
        self.rank, self.world_size, self.backend, self.device = rank, world_size, backend, device
        self.waiting_in: tuple[str, float] | None = None
        self.waited_seconds = 0.0
        self.refusal: tuple[str, str] | None = None
        self._missing = 0  # summaries that were posted, and of which those of the others are not here yet
        self._arrived: list[list[bytes]] = []  # those that are not read yet, in their order

    def reduce(self, value: Any, how: Reduction = "mean") -> Any:
        """Return a new tensor, or a number, reduced over all ranks.

        Args:
            value: a tensor, of one shape and type on all ranks; or a number. Sums of bools are whole numbers.
            how: `sum`, `mean` or `max`; as in torch, whole numbers and bools in a tensor have no mean.
        """
        check_reducible(value, how)
        if isinstance(value, Tensor):
            with self.collective("reduce"):
                self.meet(f"reduce by {how}", value.numel())
                return self._reduce(value.detach(), how)
        with self.collective("reduce"):
            values = self._gather_objects(value, "reduce")
        if how == "max":
            return max(values)
        return sum(values) / self.world_size if how == "mean" else sum(values)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank, on this rank's device; their shapes and types may differ."""
        check_gathered(tensor)
        with self.collective("gather"):
            return self._gather(tensor.detach())

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, by rank; any that can be pickled."""
        with self.collective("gather_objects"):
            return self._gather_objects(value, "gather_objects")

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the tensor, on this rank's kind of device, or the object of one rank on all ranks."""
        check_source(source, self.world_size)
        with self.collective("broadcast"):
            self.meet(f"broadcast from rank {source}")
            if self.rank != source:
                return self._receive(source)
            self._send(value)
            return value

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with self.collective("barrier"):
            self.meet("barrier")

    def vote(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks."""
        with self.collective("vote"):
            every = self._gather_objects([float(value) for value in values], "vote", len(values))
        return [max(each) for each in zip(*every, strict=True)]

    def post_summary(self, summary: bytes) -> None:
        """Post a summary at a boundary, without a wait for those of the others. At most two may be unread."""
        if self.refusal is not None:
            self.refuse("post_summary")
        self.rounds.post(SUMMARY + summary)
        self._missing += 1

    def read_summaries(self) -> list[list[bytes]]:
        """Return, for each summary that was posted and not read, those of all ranks, by rank; in their order.

        Raises:
            RuntimeError: a rank was in another collective than a boundary; says which.
        """
        while self._missing:
            found = self.rounds.ready()
            if found is None:
                with self.collective(BOUNDARY):
                    found = self.rounds.collect()
            self._keep(found)
        read, self._arrived = self._arrived, []
        for summaries in read:
            for summary in summaries:
                if not summary.startswith(SUMMARY):
                    self._check_kinds(summaries)
        return [[summary[KIND.size :] for summary in summaries] for summaries in read]

    # What is known of them from outside.

    @contextmanager
    def refusing(self, plugin: str, event: str) -> Iterator[None]:
        """Refuse collectives within, where only some ranks are: they would wait for the others for ever."""
        before, self.refusal = self.refusal, (plugin, event)
        try:
            yield
        finally:
            self.refusal = before

    def collective(self, name: str) -> Collective:
        """Return a context that says that a collective is under way; it is refused where not all ranks are."""
        return Collective(self, name)

    def refuse(self, name: str) -> NoReturn:
        """Raise RuntimeError: not all ranks are here; names who called the collective."""
        assert self.refusal is not None
        plugin, event = self.refusal
        raise RuntimeError(
            f"{plugin} calls {name} on {event}, but its handlers run on some ranks only: the others would never "
            f"come. Give every rank the plugin, enabled, with ranks = 'all'; or exchange where every rank is."
        )

    # How they travel; for use within `collective`.

    def meet(self, name: str, size: int = 0, message: bytes = b"") -> list[bytes]:
        """Begin a collective with a round of messages, which finds out whether the others begin the same one.

        gloo ends a process whose peers exchange something else than it does, without saying who and what.

        Args:
            name: of the collective.
            size: what must be the same on all ranks, too.
            message: what to exchange on the occasion.

        Returns:
            The messages of all ranks, by rank.

        Raises:
            RuntimeError: the ranks are in different collectives; says which.
        """
        self.rounds.post(_kind(name, size) + message)
        while self._missing:
            self._keep(self.rounds.collect())  # nothing else keeps them: this round may take their place
        messages = self.rounds.collect()
        self._check_kinds(messages)
        return [each[KIND.size :] for each in messages]

    def _keep(self, summaries: list[bytes]) -> None:
        self._arrived.append(summaries)
        self._missing -= 1

    @staticmethod
    def _check_kinds(messages: Sequence[bytes]) -> None:
        first = messages[0][: KIND.size]
        if all(each.startswith(first) for each in messages):
            return
        kinds = [KIND.unpack_from(each) for each in messages]
        names = [name.rstrip(b"\0").decode(errors="replace") + f" ({size})" * bool(size) for name, _, size in kinds]
        where = "; ".join(f"rank {rank} in {name}" for rank, name in enumerate(names))
        raise RuntimeError(
            f"The ranks are in different collectives: {where}. Every rank must call the same ones, in one order: a "
            f"handler or a step does so on some ranks only, or in another order, or left before."
        )

    def add_up(self, tensor: Tensor, how: Reduction = "sum") -> None:
        """Reduce a contiguous tensor over all ranks, in place."""
        sent, group = self._route(tensor)
        dist.all_reduce(sent, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group)
        if sent is not tensor:
            tensor.copy_(sent)

    def spread(self, tensor: Tensor, source: int = 0) -> None:
        """Give all ranks the content of one rank's contiguous tensor, in place."""
        sent, group = self._route(tensor)
        if len(sent):
            dist.broadcast(sent, source, group=group)
        if sent is not tensor:
            tensor.copy_(sent)

    def _route(self, tensor: Tensor) -> tuple[Tensor, ProcessGroup]:
        """Return the tensor where its group can take it, and the group."""
        if tensor.is_cuda and self.backend == "nccl":
            return tensor, self.tensors
        return tensor.cpu(), self.control

    def _reduce(self, tensor: Tensor, how: Reduction) -> Tensor:
        dtype = tensor.dtype if _is_exact(tensor) else torch.int64  # gloo adds no small ones; they would overflow
        total = tensor.to(dtype, memory_format=torch.contiguous_format, copy=True)
        self.add_up(total, how)
        if how == "mean":
            return total / self.world_size
        return total.to(tensor.dtype) if how == "max" else total

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        kinds = self._gather_objects((tensor.shape, tensor.dtype), "gather")
        lengths = [shape.numel() * dtype.itemsize for shape, dtype in kinds]
        sent, group = self._route(plain_bytes(tensor))
        padded = torch.cat([sent, sent.new_empty(max(lengths) - len(sent))])
        received = [torch.empty_like(padded) for _ in kinds]
        if len(padded):
            dist.all_gather(received, padded, group)
        return [
            each[:length].to(tensor.device).view(dtype).reshape(shape)
            for each, length, (shape, dtype) in zip(received, lengths, kinds, strict=True)
        ]

    def _gather_objects(self, value: Any, name: str, size: int = 0) -> list[Any]:
        """Return the objects of all ranks: in the messages that begin it where all are small enough."""
        pickled = pickle.dumps(value)
        own = len(pickled).to_bytes(LENGTH, "little") + pickled
        room = self.rounds.capacity - KIND.size
        received = self.meet(name, size, own if len(own) <= room else own[:LENGTH])
        longest = LENGTH + max(int.from_bytes(each[:LENGTH], "little") for each in received)
        if longest > room:
            sent = torch.frombuffer(bytearray(own).ljust(longest), dtype=torch.uint8)
            whole = [torch.empty_like(sent) for _ in received]
            dist.all_gather(whole, sent, self.control)
            received = [each.numpy().tobytes() for each in whole]
        return [_unpickle(each) for each in received]

    def _send(self, value: Any) -> None:
        """Give all ranks a value of this one: what it is first, for a tensor."""
        is_tensor = isinstance(value, Tensor)
        kind = (value.shape, value.dtype, value.device.type) if is_tensor else None
        dist.broadcast_object_list([kind, None if is_tensor else value], self.rank, group=self.control)
        if is_tensor:
            self.spread(plain_bytes(value.detach()), self.rank)

    def _receive(self, source: int) -> Any:
        held: list[Any] = [None, None]
        dist.broadcast_object_list(held, source, group=self.control)
        if held[0] is None:
            return held[1]
        shape, dtype, device = held[0]
        received = torch.empty(
            shape.numel() * dtype.itemsize, dtype=torch.uint8, device="cpu" if device == "cpu" else self.device
        )
        self.spread(received, source)
        return received.view(dtype).reshape(shape)


@cache
def _kind(name: str, size: int) -> bytes:
    encoded = name.encode()
    return KIND.pack(encoded[:NAMED], crc32(encoded), size)


BOUNDARY = "the boundary"  # a step's end, where ranks read each other's summaries
SUMMARY = _kind(BOUNDARY, 0)


def plain_bytes(tensor: Tensor) -> Tensor:
    """Return the content of a tensor as plain bytes: any type can be sent so, by any backend."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _unpickle(sent: bytes) -> Any:
    length = int.from_bytes(sent[:LENGTH], "little")
    return pickle.loads(sent[LENGTH : LENGTH + length])  # noqa: S301  # of a process of the same run


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
