"""The collectives of a process group: reduce, gather, broadcast, barrier, vote."""

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

from ...events.run import Reduction

NAME_BYTES = 64  # of a collective's name that are sent
KIND = Struct(f"<{NAME_BYTES}sIq")  # the header of a collective: its name, a checksum of the name, its size
LENGTH = 8  # bytes


def check_reducible(value: Any, how: Reduction) -> None:
    """Raise ValueError for an unknown reduction, TypeError for a value that it does not support."""
    if how not in ("sum", "mean", "max"):
        raise ValueError(
            f"reduce(value, how) takes 'sum', 'mean' or 'max', got {how!r}. For the values of all ranks, use gather or "
            f"gather_objects."
        )
    if not isinstance(value, Tensor | Real):
        raise TypeError(f"reduce takes a tensor or a number, got {type(value).__name__}.")
    if how == "mean" and isinstance(value, Tensor) and not _is_exact(value):
        raise TypeError(f"A tensor of {value.dtype} has no mean: reduce(value.float(), 'mean').")


def reduce_alone(value: Any, how: Reduction) -> Any:
    """Return the result of `Exchange.reduce` on one rank: a new tensor, or a number."""
    check_reducible(value, how)
    if isinstance(value, Tensor):
        widens = how == "sum" and not _is_exact(value)
        return value.detach().to(torch.int64 if widens else value.dtype, copy=True)
    return value / 1 if how == "mean" else sum([value]) if how == "sum" else value


def _is_exact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class Rounds(Protocol):
    """Sends a message from each rank to all ranks, in rounds. At most 3 rounds may be posted and not collected.

    Attributes:
        capacity: the maximum bytes of a message.
    """

    capacity: int

    def post(self, message: bytes) -> None:
        """Post this rank's message of the next round, without waiting."""

    def ready(self) -> list[bytes] | None:
        """Return the messages of the oldest uncollected round, by rank; None if one is still missing."""

    def collect(self) -> list[bytes]:
        """Return the messages of the oldest uncollected round, by rank.

        Raises:
            RuntimeError: a rank has left or died, or did not arrive in time.
        """

    def close(self) -> None:
        """Release all resources."""


class Collective:
    """A context that records the current collective; not a generator, because it runs in every step."""

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
    """The collectives of a group, by name. Every rank must call them, in the same order.

    Tensors on the device use `backend`. Numbers, objects and tensors on the CPU have a separate gloo group: they never
    wait for the device, and never mix with gradients.

    Args:
        rank: this process among `world_size`, from 0.
        world_size: the number of processes.
        backend: `gloo` or `nccl`, for gradients and for tensors on the device.
        device: of this process.

    Attributes:
        tensors: the torch process group for gradients and tensors on the device.
        control: the torch process group for everything else.
        rounds: sends the headers of collectives, and summaries.
        waited_seconds: the time of this process in collectives so far.
        waiting_in: the name of the current collective and its start by `time.monotonic()`, or None.
        refusal: the plugin and the event of a handler that runs on some ranks only, or None.
    """

    tensors: ProcessGroup
    control: ProcessGroup
    rounds: Rounds

    def __init__(self, rank: int, world_size: int, backend: str, device: torch.device) -> None:
        self.rank, self.world_size, self.backend, self.device = rank, world_size, backend, device
        self.waiting_in: tuple[str, float] | None = None
        self.waited_seconds = 0.0
        self.refusal: tuple[str, str] | None = None
        self._missing = 0  # rounds of summaries that were posted and not collected
        self._arrived: list[list[bytes]] = []  # rounds that were collected and not read, in order

    def reduce(self, value: Any, how: Reduction = "mean") -> Any:
        """Return a new tensor, or a number, reduced over all ranks.

        Args:
            value: a tensor, of the same shape and type on all ranks; or a number. Sums of bools are whole numbers.
            how: `sum`, `mean` or `max`; as in torch, tensors of whole numbers and bools have no mean.
        """
        check_reducible(value, how)
        if isinstance(value, Tensor):
            with self.collective("reduce"):
                self.begin(f"reduce by {how}", value.numel())
                return self._reduce(value.detach(), how)
        with self.collective("reduce"):
            values = self._gather_objects(value, "reduce")
        if how == "max":
            return max(values)
        return sum(values) / self.world_size if how == "mean" else sum(values)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank, on this rank's device; their shapes and types may differ."""
        with self.collective("gather"):
            return self._gather(tensor.detach())

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, by rank; any that can be pickled."""
        with self.collective("gather_objects"):
            return self._gather_objects(value, "gather_objects")

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the tensor, on this rank's device type, or the object of one rank on all ranks."""
        with self.collective("broadcast"):
            self.begin(f"broadcast from rank {source}")
            sent: list[Any] = [None]
            if self.rank == source:
                is_tensor = isinstance(value, Tensor)  # a clone, because a view would be sent with its whole storage
                sent = [(value.detach().cpu().clone(), value.device.type) if is_tensor else (value, "cpu")]
            dist.broadcast_object_list(sent, source, group=self.control)
            received, device_type = sent[0]
            if self.rank == source:
                return value
            return received if device_type == "cpu" else received.to(self.device)

    def barrier(self) -> None:
        """Wait for all ranks."""
        with self.collective("barrier"):
            self.begin("barrier")

    def vote(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks."""
        with self.collective("vote"):
            every = self._gather_objects([float(value) for value in values], "vote", len(values))
        return [max(column) for column in zip(*every, strict=True)]

    def post_summary(self, summary: bytes) -> None:
        """Post a summary at a boundary, without waiting for the other ranks. At most two may be unread."""
        if self.refusal is not None:
            self.refuse("post_summary")
        self.rounds.post(SUMMARY + summary)
        self._missing += 1

    def read_summaries(self) -> list[list[bytes]]:
        """Return the summaries of all ranks, by rank, for each one that was posted and not read, in order.

        Raises:
            RuntimeError: a rank was in another collective than a boundary; the error names it.
        """
        while self._missing:
            messages = self.rounds.ready()
            if messages is None:
                with self.collective(BOUNDARY):
                    messages = self.rounds.collect()
            self._store_round(messages)
        arrived, self._arrived = self._arrived, []
        for summaries in arrived:
            for summary in summaries:
                if not summary.startswith(SUMMARY):
                    self._check_kinds(summaries)
        return [[summary[KIND.size :] for summary in summaries] for summaries in arrived]

    # For the watch, and for handlers of some ranks.

    @contextmanager
    def refusing(self, plugin: str, event: str) -> Iterator[None]:
        """Refuse collectives within this context, in which only some ranks are: they would wait for ever."""
        before, self.refusal = self.refusal, (plugin, event)
        try:
            yield
        finally:
            self.refusal = before

    def collective(self, name: str) -> Collective:
        """Return a context for a collective; entering it raises if collectives are refused."""
        return Collective(self, name)

    def refuse(self, name: str) -> NoReturn:
        """Raise RuntimeError that names the caller of a refused collective."""
        assert self.refusal is not None
        plugin, event = self.refusal
        raise RuntimeError(
            f"{plugin} calls {name} on {event}, but its handlers run on some ranks only, so the collective would wait "
            f"for ever. Enable the plugin on every rank, with ranks = 'all'; or call {name} where every rank runs the "
            f"code."
        )

    # The implementation, for use within `collective`.

    def begin(self, name: str, size: int = 0, message: bytes = b"") -> list[bytes]:
        """Begin a collective with a round of messages, which checks that all ranks begin the same one.

        gloo ends a process whose peers are in another collective, without any explanation.

        Args:
            name: of the collective.
            size: must also be the same on all ranks.
            message: a message to send with the header.

        Returns:
            The messages of all ranks, by rank.

        Raises:
            RuntimeError: the ranks are in different collectives; the error names them.
        """
        self.rounds.post(_kind(name, size) + message)
        while self._missing:
            self._store_round(self.rounds.collect())  # else this round may overwrite them
        messages = self.rounds.collect()
        self._check_kinds(messages)
        return [message[KIND.size :] for message in messages]

    def _store_round(self, summaries: list[bytes]) -> None:
        self._arrived.append(summaries)
        self._missing -= 1

    @staticmethod
    def _check_kinds(messages: Sequence[bytes]) -> None:
        first = messages[0][: KIND.size]
        if all(message.startswith(first) for message in messages):
            return
        kinds = [KIND.unpack_from(message) for message in messages]
        names = [name.rstrip(b"\0").decode(errors="replace") + f" ({size})" * bool(size) for name, _, size in kinds]
        where = "; ".join(f"rank {rank} in {name}" for rank, name in enumerate(names))
        raise RuntimeError(
            f"The ranks are in different collectives: {where}. Every rank must call the same ones in the same order; "
            f"a handler or a step calls one on some ranks only or in another order, or a rank left before."
        )

    def all_reduce(self, tensor: Tensor, how: Reduction = "sum") -> None:
        """Reduce a contiguous tensor over all ranks, in place."""
        sent, group = self._route(tensor)
        dist.all_reduce(sent, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group)
        if sent is not tensor:
            tensor.copy_(sent)

    def broadcast_tensor(self, tensor: Tensor, source: int = 0) -> None:
        """Give all ranks the content of one rank's contiguous tensor, in place."""
        sent, group = self._route(tensor)
        if len(sent):
            dist.broadcast(sent, source, group=group)
        if sent is not tensor:
            tensor.copy_(sent)

    def _route(self, tensor: Tensor) -> tuple[Tensor, ProcessGroup]:
        # Moves the tensor to the device of its group.
        if tensor.is_cuda and self.backend == "nccl":
            return tensor, self.tensors
        return tensor.cpu(), self.control

    def _reduce(self, tensor: Tensor, how: Reduction) -> Tensor:
        # gloo does not sum small integers, which would overflow
        dtype = tensor.dtype if _is_exact(tensor) else torch.int64
        total = tensor.to(dtype, memory_format=torch.contiguous_format, copy=True)
        self.all_reduce(total, how)
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
            content[:length].to(tensor.device).view(dtype).reshape(shape)
            for content, length, (shape, dtype) in zip(received, lengths, kinds, strict=True)
        ]

    def _gather_objects(self, value: Any, name: str, size: int = 0) -> list[Any]:
        # Small objects fit into the messages that begin the collective.
        pickled = pickle.dumps(value)
        message = len(pickled).to_bytes(LENGTH, "little") + pickled
        capacity = self.rounds.capacity - KIND.size
        received = self.begin(name, size, message if len(message) <= capacity else message[:LENGTH])
        longest = LENGTH + max(int.from_bytes(header[:LENGTH], "little") for header in received)
        if longest > capacity:
            sent = torch.frombuffer(bytearray(message).ljust(longest), dtype=torch.uint8)
            buffers = [torch.empty_like(sent) for _ in received]
            dist.all_gather(buffers, sent, self.control)
            received = [buffer.numpy().tobytes() for buffer in buffers]
        return [_unpickle(content) for content in received]


@cache
def _kind(name: str, size: int) -> bytes:
    encoded = name.encode()
    return KIND.pack(encoded[:NAME_BYTES], crc32(encoded), size)


BOUNDARY = "the boundary"  # of a step, where ranks read each other's summaries
SUMMARY = _kind(BOUNDARY, 0)


def plain_bytes(tensor: Tensor) -> Tensor:
    """Return the content of a tensor as bytes, which any backend can send."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _unpickle(sent: bytes) -> Any:
    length = int.from_bytes(sent[:LENGTH], "little")
    return pickle.loads(sent[LENGTH : LENGTH + length])  # noqa: S301  # from a process of the same run


BYTES = 25 * 2**20  # per collective, as in torch's DistributedDataParallel


@torch.no_grad()
def broadcast_tensors(group: Exchange, tensors: Iterable[Tensor], name: str) -> None:
    """Copy rank 0's tensors to all ranks, in place. Every rank must call it, with the same shapes and types.

    Args:
        group: the ranks.
        tensors: of any types.
        name: of this exchange in reports.
    """
    with group.collective(name):
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            group.broadcast_tensor(plain_bytes(flat))
            if group.rank:
                parts = torch.split(flat, [tensor.numel() for tensor in bucket])
                torch._foreach_copy_(bucket, [part.view_as(tensor) for tensor, part in zip(bucket, parts, strict=True)])


@torch.no_grad()
def average_gradients(group: Exchange, parameters: Sequence[Tensor], name: str) -> None:
    """Average the gradients of parameters over all ranks, in place, like torch's DistributedDataParallel.

    A missing gradient counts as zero; a parameter without a gradient on any rank stays without one.

    Args:
        group: the ranks.
        parameters: the same on every rank.
        name: of this exchange in reports.

    Raises:
        TypeError: a gradient is sparse.
    """
    with group.collective(name):
        group.begin(name, sum(parameter.numel() for parameter in parameters))
        for bucket in _buckets(parameters):
            gradients = [torch.zeros_like(value) if value.grad is None else value.grad for value in bucket]
            if any(gradient.is_sparse for gradient in gradients):
                raise TypeError(
                    "A sparse gradient, as of an embedding with sparse=True, can only be averaged with one loss per "
                    "step."
                )
            missing = [index for index, parameter in enumerate(bucket) if parameter.grad is None]
            present = gradients[0].new_ones(len(bucket))
            for index in missing:
                present[index] = 0.0
            flat = torch.cat([*(value.reshape(-1) for value in gradients), present]).mul_(1.0 / group.world_size)
            group.all_reduce(flat)
            *averages, present = torch.split(flat, [*(value.numel() for value in gradients), len(bucket)])
            for parameter, average in zip(bucket, averages, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(average.view_as(parameter))
            for index in missing:
                if present[index]:  # another rank has one; this waits for the device
                    bucket[index].grad = averages[index].view_as(bucket[index]).clone()


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    # One type and device per bucket, of limited size.
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        bucket, size = [kind[0]], kind[0].nbytes
        for tensor in kind[1:]:
            if size + tensor.nbytes > BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket
