"""The processes that train together: joining them, and leaving them."""

from __future__ import annotations

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
from secrets import token_bytes
from struct import Struct
from time import monotonic, sleep
from typing import Any
from uuid import uuid4
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not for strict checkers
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import ProcessGroup

from ....events.errors import error_text
from .exchange import Exchange
from .failure import LateRankError, is_broken_collective
from .membership import Membership

try:
    import fcntl
except ImportError:  # on Windows; its ranks exchange by gloo
    fcntl = None  # type: ignore[assignment]

HEAD = Struct("<QII")  # the number of a round, the bytes of the message, their checksum
SLOT = 4096  # bytes of a head and a message
SLOTS = 8  # of each rank, for the rounds that not everybody has collected; there are 6 at most
TOKEN = 32  # bytes
MEMORY = Path("/dev/shm")  # noqa: S108  # memory of this machine; another folder may be one that several machines share
SPIN = 50e-6  # seconds of looking without a sleep; not longer, as another rank may need this core
FIRST_SLEEP, LONGEST_SLEEP = 50e-6, 1e-3
LOOK = 0.05  # seconds between two looks whether the others still live


class Board:
    """Every rank writes its messages into slots of its own, and reads those of the others.

    Nothing is assumed of the order in which memory is seen: a message counts when its head has the number of the round
    and its checksum fits. A slot is used again 8 rounds later, when everybody has collected it: who posts round n has
    collected n - 3, as at most 3 are posted and not collected, and the writers of those messages had collected n - 6.

    Each rank holds a lock on a byte of the file, which the kernel takes away when the process ends, however it ends.

    Args:
        file: the descriptor of the board's file, locked for this rank; the board closes it.
        rank: this rank.
        world_size: how many there are.
        timeout: seconds after which a rank is not waited for any longer.

    Attributes:
        capacity: the bytes of a message at most.
        has_failed: returns whether another rank has failed, as far as this one knows; then no rank is waited for.
    """

    capacity = SLOT - HEAD.size

    def __init__(self, file: int, rank: int, world_size: int, timeout: float) -> None:
        self._file, self._rank, self._world_size, self._timeout = file, rank, world_size, timeout
        self.has_failed: Callable[[], bool] = bool
        self._posted, self._collected = 0, 0
        self._own: deque[bytes] = deque()  # messages that were posted and not collected
        self._memory = mmap(file, _size(world_size))
        self._begins = [TOKEN + rank * SLOTS * SLOT for rank in range(world_size)]

    def post(self, message: bytes) -> None:
        """Post this rank's message of the next round, without a wait."""
        self._own.append(message)
        assert len(self._own) <= 3
        self._posted = number = self._posted + 1
        slot = HEAD.pack(number, len(message), crc32(message, number)) + message
        begin = self._begins[self._rank] + number % SLOTS * SLOT
        self._memory[begin : begin + len(slot)] = slot

    def ready(self) -> list[bytes] | None:
        """Return the messages of the oldest round that is not collected, by rank; None where one is missing yet."""
        number, memory, found = self._collected + 1, self._memory, []
        place = number % SLOTS * SLOT
        for rank, begin in enumerate(self._begins):
            if rank == self._rank:
                found.append(self._own[0])
                continue
            begin += place
            written, length, checksum = HEAD.unpack_from(memory, begin)
            if written != number or length > self.capacity:
                return None
            message = memory[begin + HEAD.size : begin + HEAD.size + length]
            if crc32(message, number) != checksum:  # it is being written
                return None
            found.append(message)
        self._collected = number
        self._own.popleft()
        return found

    def collect(self) -> list[bytes]:
        """Return the messages of the oldest round that is not collected, by rank.

        Raises:
            DistError: a rank has left or died; LateRankError, where it did not come in time.
        """
        now, waited, looked, pause = monotonic(), 0.0, 0.0, FIRST_SLEEP
        while (found := self.ready()) is None:
            before, now = now, monotonic()
            waited += min(now - before, LOOK)  # while this process was stopped (SIGSTOP), it has not waited
            if waited < SPIN:  # without a yield: where others wait for the core, it comes back late
                continue
            sleep(pause)
            pause = min(2 * pause, LONGEST_SLEEP)
            if waited - looked > LOOK:
                looked = waited
                if (gone := self._gone()) or self.has_failed():
                    if (found := self.ready()) is not None:  # posted just before
                        break
                    raise DistError("The board: " + (f"rank {gone[0]} is gone." if gone else "a rank has failed."))
            if waited > self._timeout:
                raise LateRankError(f"The board: timed out after {self._timeout:g} s of waiting for another rank.")
        return found

    def close(self) -> None:
        """Leave the board."""
        self._memory.close()
        os.close(self._file)

    def _gone(self) -> list[int]:
        """Return the ranks that hold their locks no more."""
        gone = []
        for rank in range(self._world_size):
            if rank != self._rank:
                with suppress(OSError):  # it is held
                    fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
                    fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
                    gone.append(rank)
        return gone


def open_board(
    rank: int, world_size: int, timeout: float, broadcast: Callable[[Any], Any], gather: Callable[[Any], list[Any]]
) -> Board | None:
    """Return a board if all ranks can read what rank 0 has written into its file, else None. A collective.

    Nobody sees the file afterwards: it ends with the processes that have it open.

    Args:
        rank: this rank.
        world_size: how many there are.
        timeout: as `Board`.
        broadcast: returns a value of rank 0 on all ranks.
        gather: returns the values of all ranks.
    """
    token, own, path = token_bytes(TOKEN), None, None
    with suppress(OSError):  # no room, or nowhere to write
        if rank == 0 and fcntl is not None:
            own, path = _made(world_size, token)
    made, board = path, None
    try:
        path, token = broadcast((path, token))
        if rank and path is not None and fcntl is not None:
            own = _opened(path, token)
        is_held = own is not None and _locked(own, rank)
        if all(gather(is_held)) and own is not None:
            board = Board(own, rank, world_size, timeout)
    finally:
        if made is not None:
            Path(made).unlink()
        if own is not None and board is None:
            os.close(own)
    return board


def _made(world_size: int, token: bytes) -> tuple[int, str]:
    """Make the file, which only this user can open; written in full, as a hole in a full disk would end the process."""
    own, path = tempfile.mkstemp(prefix="heliograph-", dir=MEMORY)
    try:
        with open(own, "wb", closefd=False) as file:  # a descriptor
            file.write(token + bytes(_size(world_size) - TOKEN))
    except OSError:
        os.close(own)
        Path(path).unlink()
        raise
    return own, path


def _opened(path: str, token: bytes) -> int | None:
    """Open the file if it is the one that rank 0 has made, and not another machine's or container's."""
    try:
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.read(own, TOKEN) == token:
        return own
    os.close(own)
    return None


def _locked(own: int, rank: int) -> bool:
    """Lock this rank's byte; return whether the file system can do that."""
    try:
        fcntl.lockf(own, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    except OSError:
        return False
    return True


def _size(world_size: int) -> int:
    return TOKEN + SLOTS * SLOT * world_size


LENGTH = 2  # bytes, before a message


class Group(Exchange):
    """The group of one run, joined when it is made. Every rank must make it, and call its collectives in one order.

    Tensors on the device travel by `backend`. Numbers, objects and tensors on the CPU have a gloo group of their own:
    they never wait for the device, and never get between gradients.

    Where the default process group of `torch.distributed` was initialised by somebody else, the groups are made next to
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
        RuntimeError: the ranks cannot reach each other; one left while they met.
    """

    store: Store

    def __init__(self, member: Membership, backend: str, device: torch.device, timeout: float) -> None:
        super().__init__(member.rank, member.world_size, backend, device)
        self._owns_default = not dist.is_initialized()
        with close_in_children():
            if self._owns_default:
                self.store = rendezvous(member, timeout)
            try:
                board = self._meet(timeout)
            except BaseException as error:
                if not is_broken_collective(error):
                    raise
                raise RuntimeError(
                    f"Another rank left while all {self.world_size} met; rank {self.rank} was there. Look at what the "
                    f"others printed: one of them failed before its training began, for a reason of its own. If none "
                    f"did, they could not be connected: {error_text(error)}"
                ) from error
        if board is not None:
            self.rounds.close()
            self.rounds = board

    def _meet(self, timeout: float) -> Board | None:
        """Make the groups, and return the board where all ranks see one; they are left again if that fails."""
        if self._owns_default:
            self._found(timeout)
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

    def _found(self, timeout: float) -> None:
        """Initialise the default process group; nothing is left of it if that fails."""
        # Its functions have the default group as default arguments; imported later (by torch's own wrapper), they would
        # keep it alive, and with it the connections on which other ranks wait.
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
            c10d._world.group_count = 0  # the next group is named by it, on all ranks alike
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
        self.rounds.close()
        del self.control, self.tensors, self.rounds
        while groups:
            end(groups.pop())


Socket = tuple[int, int]  # its descriptor and its inode: descriptors are used again


FOLDER = Path("/dev/fd")  # of this process's descriptors; Windows has none, and forks no children


_known: set[Socket] = set()


@contextmanager
def close_in_children() -> Iterator[None]:
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


OFFER = "heliograph/offer"
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks; a wait within the store itself warns on stderr
_stores: dict[tuple[str, int], Store] = {}  # the one connection of this process, kept for later runs


def rendezvous(member: Membership, timeout: float) -> Store:
    """Return a store that only the processes of this group and this attempt use. Every rank must call it.

    Args:
        member: this process's place, with the address of the store.
        timeout: seconds after which a rank that did not come is missing.

    Raises:
        TimeoutError: not every rank came; says which.
        RuntimeError: the store cannot be hosted, or went away.
    """
    if member.world_size == 1:
        return HashStore()
    end = time.monotonic() + timeout
    store = _connected(member, timeout)
    try:
        nonce = _invite(store, member, timeout, end) if member.rank == 0 else _accept(store, member, timeout, end)
    except DistError as error:
        raise RuntimeError(
            f"The store at {member.address}:{member.port} went away while rank {member.rank} of {member.world_size} "
            f"waited for the others there: the process that hosts it has ended ({error})."
        ) from error
    return PrefixStore(nonce, store)


def _connected(member: Membership, timeout: float) -> Store:
    """Return the connection of an earlier run where it is still open, else a new one."""
    place = (member.address, member.port)
    if (store := _stores.get(place)) is not None:
        with suppress(DistError):
            store.check([OFFER])
            return store
    _stores.clear()
    store = _stores[place] = _connect(member, timeout)
    return store


def _connect(member: Membership, timeout: float) -> Store:
    """Return the store that torchrun's agent hosts, or else rank 0."""
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
                f"Rank 0 cannot host the store by which the ranks find each other at {at} ({error}): set MASTER_PORT "
                f"to a free port."
            ) from error
        host = "torchrun's agent" if member.agent_store else "rank 0"
        raise TimeoutError(
            f"Rank {member.rank} of {member.world_size} found no store at {at} within {timeout:g} s: {host} should "
            f"host it. Is it running, and is MASTER_ADDR its machine?"
        ) from error


def _invite(store: Store, member: Membership, timeout: float, end: float) -> str:
    """Offer a nonce, and confirm it to all when all have answered; return it."""
    nonce = uuid4().hex
    answers = {rank: _answer(nonce, rank) for rank in range(1, member.world_size)}
    store.set(OFFER, json.dumps([nonce, member.world_size]))
    for _ in _looks(end):
        if store.check(list(answers.values())):
            confirmed = [nonce, *(store.get(key).decode() for key in answers.values())]
            store.set(_go(nonce), json.dumps(confirmed))
            return nonce
    missing = [rank for rank, key in answers.items() if not store.check([key])]
    raise TimeoutError(_missing(missing, member, timeout))


def _accept(store: Store, member: Membership, timeout: float, end: float) -> str:
    """Answer each offer of rank 0 until it confirms this very answer; return what it offered."""
    nonce = uuid4().hex
    offer, answered, world_size = "", "", member.world_size
    for _ in _looks(end):
        if not store.check([OFFER]):
            continue
        offer, world_size = json.loads(store.get(OFFER))
        if world_size != member.world_size:  # of an attempt with another number of processes
            continue
        if offer != answered:
            store.set(_answer(offer, member.rank), nonce)
            answered = offer
        if store.check([_go(offer)]) and json.loads(store.get(_go(offer)))[member.rank] == nonce:
            return str(offer)
    if world_size != member.world_size:
        raise TimeoutError(
            f"Rank {member.rank} expects {member.world_size} ranks, but rank 0 gathers {world_size}: set the same "
            f"WORLD_SIZE for all."
        )
    absent = [rank for rank in range(1, world_size) if not store.check([_answer(offer, rank)])]
    is_open = offer and not store.check([_go(offer)])
    raise TimeoutError(_missing(absent if is_open and absent else [0], member, timeout))


def _looks(end: float) -> Iterator[None]:
    """Yield at once, and then after ever longer pauses, until the end."""
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
        f"{names} of {member.world_size} did not come within {timeout:g} s; rank {member.rank} waited. Was every "
        f"process started, does each run the same script, and does none end before its training begins?"
    )


class GlooRounds:
    """Every rank's messages travel by all-gathers that nobody waits for until they are collected.

    gloo matches them by the order in which they were begun, with all else in the group: so there may be several at a
    time, and other collectives between.

    Args:
        group: the torch process group.

    Attributes:
        capacity: the bytes of a message at most: all are sent in this length.
    """

    capacity = 254

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._begun: deque[tuple[dist.Work, list[Tensor]]] = deque()

    def post(self, message: bytes) -> None:
        """Post this rank's message of the next round, without a wait."""
        padded = bytearray(len(message).to_bytes(LENGTH, "little") + message).ljust(LENGTH + self.capacity)
        own = torch.frombuffer(padded, dtype=torch.uint8)
        received = [torch.empty_like(own) for _ in range(self._group.size())]
        work = dist.all_gather(received, own, self._group, async_op=True)
        assert work is not None
        self._begun.append((work, received))

    def ready(self) -> list[bytes] | None:
        """Return the messages of the oldest round that is not collected, by rank; None where one is missing yet."""
        return self.collect() if self._begun[0][0].is_completed() else None

    def collect(self) -> list[bytes]:
        """Return the messages of the oldest round that is not collected, by rank.

        Raises:
            RuntimeError: a rank has left or died, or did not come in time.
        """
        work, received = self._begun.popleft()
        try:
            work.wait()
        except BaseException:
            del work, received  # kept alive by the traceback, they would keep the connections that others wait on
            raise
        return [_message(each.numpy().tobytes()) for each in received]

    def close(self) -> None:
        """Forget the group: while anything refers to it, the others keep waiting."""
        self._begun.clear()
        del self._group


def _message(sent: bytes) -> bytes:
    length = int.from_bytes(sent[:LENGTH], "little")
    return sent[LENGTH : LENGTH + length]
