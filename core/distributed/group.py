"""The process group of a run: rendezvous, joining, leaving, and its message rounds."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from mmap import mmap
from pathlib import Path
from struct import Struct
from time import monotonic, sleep
from typing import Any
from uuid import uuid4
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import ProcessGroup

from ...events.checks import error_text
from .collective_errors import LateRankError, is_broken_collective
from .exchange import Exchange
from .membership import Membership

HEAD = Struct("<QII")  # the number of a round, the length of the message, its checksum
SLOT = 4096  # bytes for a head and a message
SLOTS = 8  # per rank, for rounds that some rank has not collected; at most 6
MEMORY = Path("/dev/shm")  # noqa: S108  # memory of this machine; another folder may be shared by machines
SPIN = 50e-6  # seconds of polling without a sleep; short, because another rank may need this core
FIRST_SLEEP, LONGEST_SLEEP = 50e-6, 1e-3
LOOK = 0.05  # seconds between two checks that the other ranks are alive


class Board:
    """Message rounds in shared memory: every rank writes into its own slots, and reads those of the other ranks.

    No memory order is assumed: a message is valid if its head has the number of the round and its checksum fits. A slot
    is reused 8 rounds later, when all ranks have collected it: at most 3 rounds are posted and not collected, so a rank
    that posts round n has collected n - 3, and the writers of those messages had collected n - 6.

    Each rank holds a lock on a byte of the file, which the kernel releases when the process ends in any way.

    Args:
        file: the descriptor of the board's file, locked for this rank; the board closes it.
        rank: this rank.
        world_size: the number of ranks.
        timeout: seconds to wait for a rank.

    Attributes:
        capacity: the maximum bytes of a message.
        has_failed: returns whether another rank is known to have failed; then the board stops waiting.
    """

    capacity = SLOT - HEAD.size

    def __init__(self, file: int, rank: int, world_size: int, timeout: float) -> None:
        self._file, self._rank, self._world_size, self._timeout = file, rank, world_size, timeout
        self.has_failed: Callable[[], bool] = bool
        self._posted, self._collected = 0, 0
        self._uncollected: deque[bytes] = deque()  # this rank's messages
        self._memory = mmap(file, SLOTS * SLOT * world_size)
        self._begins = [rank * SLOTS * SLOT for rank in range(world_size)]

    def post(self, message: bytes) -> None:
        self._uncollected.append(message)
        assert len(self._uncollected) <= 3
        self._posted = number = self._posted + 1
        slot = HEAD.pack(number, len(message), crc32(message, number)) + message
        begin = self._begins[self._rank] + number % SLOTS * SLOT
        self._memory[begin : begin + len(slot)] = slot

    def ready(self) -> list[bytes] | None:
        number, memory, messages = self._collected + 1, self._memory, list[bytes]()
        place = number % SLOTS * SLOT
        for rank, begin in enumerate(self._begins):
            if rank == self._rank:
                messages.append(self._uncollected[0])
                continue
            begin += place
            written, length, checksum = HEAD.unpack_from(memory, begin)
            if written != number or length > self.capacity:
                return None
            message = memory[begin + HEAD.size : begin + HEAD.size + length]
            if crc32(message, number) != checksum:  # it is still being written
                return None
            messages.append(message)
        self._collected = number
        self._uncollected.popleft()
        return messages

    def collect(self) -> list[bytes]:
        now, waited, looked, pause = monotonic(), 0.0, 0.0, FIRST_SLEEP
        while (messages := self.ready()) is None:
            before, now = now, monotonic()
            waited += min(now - before, LOOK)  # a long gap means that this process was stopped (SIGSTOP)
            if waited < SPIN:  # no sleep yet: it returns late if other processes wait for the core
                continue
            sleep(pause)
            pause = min(2 * pause, LONGEST_SLEEP)
            if waited - looked > LOOK:
                looked = waited
                if (gone := self._gone()) or self.has_failed():
                    if (messages := self.ready()) is not None:  # posted just before
                        break
                    raise DistError("The board: " + (f"rank {gone[0]} is gone." if gone else "a rank has failed."))
            if waited > self._timeout:
                raise LateRankError(f"The board: timed out after {self._timeout:g} s of waiting for another rank.")
        return messages

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)

    def _gone(self) -> list[int]:
        # A rank that is gone does not hold its lock.
        gone = []
        for rank in range(self._world_size):
            if rank != self._rank:
                with suppress(OSError):  # the rank is alive
                    fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
                    fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
                    gone.append(rank)
        return gone


def open_board(
    rank: int, world_size: int, timeout: float, broadcast: Callable[[Any], Any], gather: Callable[[Any], list[Any]]
) -> Board | None:
    """Return a board if all ranks can read rank 0's file, else None. A collective.

    The file is unlinked at once; it ends with the processes that have it open.

    Args:
        rank: this rank.
        world_size: the number of ranks.
        timeout: as `Board`.
        broadcast: returns a value of rank 0 on all ranks.
        gather: returns the values of all ranks.
    """
    created, descriptor, is_written, is_ready, board = "", -1, False, False, None
    try:
        with suppress(OSError):  # no space, or no such folder
            if rank == 0:
                descriptor, created = tempfile.mkstemp(prefix="heliograph-", dir=MEMORY)
                # Written in full: a write into a hole of a full disk would end the process.
                Path(created).write_bytes(bytes(SLOTS * SLOT * world_size))
                is_written = True
        path = broadcast(created if is_written else "")
        with suppress(OSError):  # the file of another machine or container, or a file system without locks
            if rank and path:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if path:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                is_ready = True
        if all(gather(is_ready)):
            board = Board(descriptor, rank, world_size, timeout)
    finally:
        if created:
            Path(created).unlink()
        if descriptor >= 0 and board is None:
            os.close(descriptor)
    return board


LENGTH = 2  # bytes of the length before a message


class Group(Exchange):
    """The process group of one run, joined when created. Every rank must create it, and call its collectives in order.

    If the default process group of `torch.distributed` is initialized already, the groups are created in addition to
    it.

    Args:
        member: this process's place.
        backend: `gloo` or `nccl`, for gradients and for tensors on the device.
        device: of this process.
        timeout: seconds after which a rank stops waiting for other ranks.

    Attributes:
        store: the store of this group's processes.

    Raises:
        TimeoutError: some ranks did not arrive; the error names them.
        RuntimeError: the ranks cannot reach each other; one left during the initialization.
    """

    store: Store

    def __init__(self, member: Membership, backend: str, device: torch.device, timeout: float) -> None:
        super().__init__(member.rank, member.world_size, backend, device)
        self._owns_default = not dist.is_initialized()
        with close_in_children():
            if self._owns_default:
                self.store = rendezvous(member, timeout)
            try:
                board = self._initialize(timeout)
            except BaseException as error:
                if not is_broken_collective(error):
                    raise
                raise RuntimeError(
                    f"A rank exited while the process group of {self.world_size} was initialized; this is rank "
                    f"{self.rank}. See the output of the other ranks: one failed before its training began. If none "
                    f"did, they could not connect: {error_text(error)}"
                ) from error
        if board is not None:
            self.rounds.close()
            self.rounds = board

    def _initialize(self, timeout: float) -> Board | None:
        # Leaves the groups again if it fails; returns a board if all ranks can read it.
        if self._owns_default:
            self._initialize_default(timeout)
        else:
            limit = timedelta(seconds=timeout)
            self.tensors = dist.new_group(backend=self.backend, timeout=limit)
            self.control = dist.new_group(backend="gloo", timeout=limit)
            self.rounds = GlooRounds(self.control)
            self.store = PrefixStore(self.broadcast(uuid4().hex), c10d._get_default_store())
        try:
            return open_board(self.rank, self.world_size, timeout, self.broadcast, self.gather_objects)
        except BaseException:
            self.leave()
            raise

    def _initialize_default(self, timeout: float) -> None:
        # Leaves nothing behind if it fails.
        # Its functions have the default group as default arguments. If torch imported it later, they would keep the
        # group alive, and with it the connections on which other ranks wait.
        import_module("torch.distributed.nn.functional")
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
            self.rounds = GlooRounds(self.control)
        except BaseException:
            if dist.is_initialized():
                dist.destroy_process_group()
            c10d._world.group_count = 0  # it names the next group, equally on all ranks
            raise

    def leave(self, *, aborting: bool = False) -> None:
        """Leave the group without a collective. A rank that still waits in one of its collectives gets an error.

        Delete references to the torch groups before: a process that destroys a gloo group of a live
        `DistributedDataParallel` may abort at exit.

        Args:
            aborting: whether unfinished collectives may be running.
        """
        end = c10d._abort_process_group if aborting and self.backend == "nccl" else dist.destroy_process_group
        groups = [None] if self._owns_default else [self.control, self.tensors]
        self.rounds.close()
        del self.control, self.tensors, self.rounds
        while groups:
            end(groups.pop())


Socket = tuple[int, int]  # descriptor and inode, because descriptors are reused
_group_sockets: set[Socket] = set()


@contextmanager
def close_in_children() -> Iterator[None]:
    """Close sockets opened within this context in every child that is forked later, such as a loader worker."""
    before = _sockets()
    try:
        yield
    finally:
        now = _sockets()
        _group_sockets.intersection_update(now)
        _group_sockets.update(now - before)


def _sockets() -> set[Socket]:
    sockets: set[Socket] = set()
    for name in os.listdir("/dev/fd"):  # noqa: PTH208  # the descriptors of this process: numbers, not files
        with suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets.add((int(name), status.st_ino))
    return sockets


def _close_group_sockets() -> None:
    for number, inode in _group_sockets:
        with suppress(OSError):  # closed already
            if os.fstat(number).st_ino == inode:
                os.close(number)
    _group_sockets.clear()


os.register_at_fork(after_in_child=_close_group_sockets)


OFFER = "heliograph/offer"
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between two polls; waiting in the store itself warns on stderr
_stores: dict[tuple[str, int], Store] = {}  # the connection of this process, kept for later runs


def rendezvous(member: Membership, timeout: float) -> Store:
    """Return a store that only the processes of this group and this attempt use. Every rank must call it.

    Args:
        member: this process's place, with the address of the store.
        timeout: seconds to wait for each rank.

    Raises:
        TimeoutError: some ranks did not arrive; the error names them.
        RuntimeError: the store cannot be hosted, or is gone.
    """
    if member.world_size == 1:
        return HashStore()
    end = time.monotonic() + timeout
    store = _reuse_or_connect(member, timeout)
    try:
        nonce = _invite(store, member, timeout, end) if member.rank == 0 else _accept(store, member, timeout, end)
    except DistError as error:
        raise RuntimeError(
            f"The store at {member.address}:{member.port} was lost while rank {member.rank} of {member.world_size} "
            f"waited for the other ranks: the process that hosts it has ended ({error})."
        ) from error
    return PrefixStore(nonce, store)


def _reuse_or_connect(member: Membership, timeout: float) -> Store:
    place = (member.address, member.port)
    if (store := _stores.get(place)) is not None:
        with suppress(DistError):
            store.check([OFFER])
            return store
    _stores.clear()
    store = _stores[place] = _connect(member, timeout)
    return store


def _connect(member: Membership, timeout: float) -> Store:
    # torchrun's agent hosts the store, or else rank 0.
    hosts = member.rank == 0 and not member.agent_store
    try:
        return TCPStore(
            member.address,
            member.port,
            is_master=hosts,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except DistError as error:
        at = f"{member.address}:{member.port}"
        if hosts:
            raise RuntimeError(
                f"Rank 0 cannot host the store for the rendezvous of the ranks at {at} ({error}): set MASTER_PORT to a "
                f"free port."
            ) from error
        host = "torchrun's agent" if member.agent_store else "rank 0"
        raise TimeoutError(
            f"Rank {member.rank} of {member.world_size} found no store at {at} within {timeout:g} s: {host} should "
            f"host it. Is it running, and is MASTER_ADDR its machine?"
        ) from error


def _invite(store: Store, member: Membership, timeout: float, end: float) -> str:
    # Rank 0 offers a nonce, and confirms it when all ranks have answered.
    nonce = uuid4().hex
    answers = {rank: _answer(nonce, rank) for rank in range(1, member.world_size)}
    store.set(OFFER, nonce)
    for _ in _polls(end):
        if store.check(list(answers.values())):
            confirmed = [nonce, *(store.get(key).decode() for key in answers.values())]
            store.set(_go(nonce), json.dumps(confirmed))
            return nonce
    missing = [rank for rank, key in answers.items() if not store.check([key])]
    raise TimeoutError(_missing(missing, member, timeout))


def _accept(store: Store, member: Membership, timeout: float, end: float) -> str:
    # The other ranks answer each offer until rank 0 confirms their own answer.
    nonce = uuid4().hex
    offer = ""
    for _ in _polls(end):
        if not store.check([OFFER]):
            continue
        if (newest := store.get(OFFER).decode()) != offer:
            offer = newest
            store.set(_answer(offer, member.rank), nonce)
        # An offer of an earlier attempt, perhaps of fewer ranks, does not have this nonce.
        if store.check([_go(offer)]) and json.loads(store.get(_go(offer)))[member.rank :][:1] == [nonce]:
            return offer
    absent = [rank for rank in range(1, member.world_size) if not store.check([_answer(offer, rank)])]
    is_open = offer and not store.check([_go(offer)])
    raise TimeoutError(_missing(absent if is_open and absent else [0], member, timeout))


def _polls(end: float) -> Iterator[None]:
    # The pauses grow.
    pause = FIRST_PAUSE
    yield
    while time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        yield


def _answer(offer: str, rank: int) -> str:
    return f"heliograph/{offer}/join/{rank}"


def _go(offer: str) -> str:
    return f"heliograph/{offer}/go"


def _missing(ranks: list[int], member: Membership, timeout: float) -> str:
    names = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    return (
        f"{names} of {member.world_size} did not arrive within {timeout:g} s; rank {member.rank} waited. Was every "
        f"process started, does each run the same script, and does none end before its training begins?"
    )


class GlooRounds:
    """Message rounds by asynchronous all-gathers.

    gloo matches them by their order with all other collectives of the group, so several may run at a time, and other
    collectives between them.

    Args:
        group: the torch process group.

    Attributes:
        capacity: the maximum bytes of a message; all are sent with this length.
    """

    capacity = 254

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._pending: deque[tuple[dist.Work, list[Tensor]]] = deque()

    def post(self, message: bytes) -> None:
        padded = bytearray(len(message).to_bytes(LENGTH, "little") + message).ljust(LENGTH + self.capacity)
        sent = torch.frombuffer(padded, dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self._group.size())]
        work = dist.all_gather(received, sent, self._group, async_op=True)
        assert work is not None
        self._pending.append((work, received))

    def ready(self) -> list[bytes] | None:
        return self.collect() if self._pending[0][0].is_completed() else None

    def collect(self) -> list[bytes]:
        work, received = self._pending.popleft()
        try:
            work.wait()
        except BaseException:
            del work, received  # the traceback would keep them, and the connections on which other ranks wait
            raise
        return [_message(buffer.numpy().tobytes()) for buffer in received]

    def close(self) -> None:
        # While there is a reference to the group, the other ranks keep waiting.
        self._pending.clear()
        del self._group


def _message(sent: bytes) -> bytes:
    length = int.from_bytes(sent[:LENGTH], "little")
    return sent[LENGTH : LENGTH + length]
