"""The processes that train together: joining them, and leaving them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from .exchange import Exchange
from .membership import Membership
from .rendezvous import rendezvous


class Group(Exchange):
    """The group of one run, joined when it is made. Every rank must make it, and call its collectives in one order.

    Tensors on the device travel by `backend`. Votes, objects and tensors on the CPU have a gloo group of their own:
    they never wait for the device, and never get between gradients.

    Where the default process group of `torch.distributed` was initialised by somebody else, the groups are made beside
    it, and it is left as it was.

    Args:
        member: this process's place.
        backend: `gloo` or `nccl`, for gradients and for tensors on the device.
        device: where this process computes.
        timeout: seconds after which a rank stops waiting for the others.

    Attributes:
        rank: this process among `world_size`, from 0.
        world_size: how many processes there are.
        store: what only this group's processes read and write.
        tensors: the torch process group for gradients and tensors on the device.
        waiting_in: the name of the collective that is under way, with `time.monotonic()` of its beginning; else None.

    Raises:
        TimeoutError: not every rank came; says which.
        RuntimeError: the ranks cannot reach each other.
    """

    store: Store

    def __init__(self, member: Membership, backend: str, device: torch.device, timeout: float) -> None:
        super().__init__(member.rank, member.world_size, backend, device)
        self._owns_default = not dist.is_initialized()
        with kept_from_children():
            if self._owns_default:
                self._found(member, timeout)
            else:
                self._join(timeout)

    def _join(self, timeout: float) -> None:
        """Make the groups beside the default one."""
        limit = timedelta(seconds=timeout)
        self.tensors = dist.new_group(backend=self.backend, timeout=limit)
        self.control = dist.new_group(backend="gloo", timeout=limit)
        self.store = PrefixStore(self.broadcast(uuid4().hex), c10d._get_default_store())

    def _found(self, member: Membership, timeout: float) -> None:
        """Initialise the default process group; nothing is left of it if that fails."""
        # Its functions have the default group as default arguments; imported later (by torch's own wrapper), they would
        # keep it alive, and with it the connections on which other ranks wait.
        import_module("torch.distributed.nn.functional")
        self.store = rendezvous(member, timeout)
        limit = timedelta(seconds=timeout)
        try:
            dist.init_process_group(
                self.backend,
                store=PrefixStore("torch", self.store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=limit,
                device_id=self.device if self.backend == "nccl" else None,
            )
            self.tensors = c10d._get_default_group()
            self.control = dist.new_group(backend="gloo", timeout=limit)
        except BaseException:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise

    def leave(self, *, aborting: bool = False) -> None:
        """Leave the group; not a collective. A rank that still waits in a collective of it is informed.

        What refers to the torch groups must be gone before: a process that destroys a gloo group under a living
        `DistributedDataParallel` may be aborted when it exits.

        Args:
            aborting: whether collectives may be under way that will never end.
        """
        end = c10d._abort_process_group if aborting and self.backend == "nccl" else dist.destroy_process_group
        groups = [None] if self._owns_default else [self.control, self.tensors]
        del self.control, self.tensors
        while groups:
            end(groups.pop())


Socket = tuple[int, int]  # its descriptor and its inode: descriptors are used again


FOLDER = Path("/dev/fd")  # of this process's descriptors; Windows has none, and forks no children


_known: set[Socket] = set()


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Let every child that is forked later, such as a worker of a loader, close what sockets are opened within."""
    before = _sockets()
    try:
        yield
    finally:
        now = _sockets()
        _known.intersection_update(now)
        _known.update(now - before)


def _sockets() -> set[Socket]:
    found: set[Socket] = set()
    for name in os.listdir(FOLDER) if FOLDER.is_dir() else ():  # noqa: PTH208  # numbers, not files
        with suppress(OSError):  # it was that of the listing
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _close() -> None:
    for number, inode in _known:
        with suppress(OSError):  # closed before
            if os.fstat(number).st_ino == inode:
                os.close(number)
    _known.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close)
