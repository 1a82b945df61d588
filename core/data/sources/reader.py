"""Reading a loader from a position on, apart from the training's random stream, and the life of its workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial
from itertools import count
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..draws.generators import isolated
from ..draws.held_generators import BEGIN, Held
from .stateless import Reading

MASK = 2**63 - 1


def rewired(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other parts; the user's own stays as it is."""
    own = shielded(loader)
    own.__dict__.update(changes)  # a loader refuses to have its parts set
    own.generator = torch.Generator()  # what a worker is first seeded by is drawn from it
    return own


def begun(loader: Iterable[Any], reading: Reading, held: Held | None = None, rank: int = 0) -> Iterator[Any]:
    """Return an iterator; making it draws nothing from the training's random stream."""
    with isolated():
        if held is not None:
            held.seed(reading.seed, reading.epoch, rank, BEGIN)
        if isinstance(loader, DataLoader) and isinstance(loader.generator, torch.Generator) and held is None:
            loader.generator.manual_seed((reading.seed + reading.epoch) & MASK)
        return iter(loader)


def apart(
    batches: Iterator[Any], reading: Reading | None = None, held: Held | None = None, rank: int = 0, first: int = 0
) -> Iterator[Any]:
    """Read batches in this process without touching the training's random stream.

    Given a reading, each is read under its key; otherwise the dataset sees to that.
    """
    isolation = isolated()
    for batch in count(first):
        with isolation:
            if reading is not None and held is not None:
                held.seed(reading.seed, reading.epoch, rank, batch)
            try:
                loaded = next(batches)
            except StopIteration:
                return
        yield loaded


def read_again(batches: Iterator[Any], reading: Reading) -> Iterator[Any]:
    """Return batches from the position on, after reading those before it once more."""
    batch = None
    for done in range(reading.batch):
        reading.tell(done, reading.batch)
        try:
            batch = next(batches)
        except StopIteration:
            raise ValueError(
                f"The train loader ended after {done} batches of epoch {reading.epoch}, of which {reading.batch} had "
                f"been consumed when the checkpoint was written: resume with the data that it was written with."
            ) from None
    if reading.batch:
        reading.tell(reading.batch, reading.batch)
        if reading.check is not None:
            reading.check(batch)
    return batches


LOOK = 1.0  # seconds between two looks at the main process, where the system reports nothing


def prepare_worker(worker_id: int, then: Callable[[int], None] | None = None) -> None:
    """In a worker process of a loader: end when the main process has ended, and leave signals to that one.

    A `worker_init_fn`. Torch's own watchdog looks for the main process only after it, and takes whatever process is
    the parent then for the main one: for ever, where the main process was killed before.

    Without it, workers would die of the SIGTERM that a cluster sends to the whole process group, and the main process
    of their death, before it has saved. A SIGTERM from the main process itself is obeyed, as that is how it gets rid of
    its workers. Where the system does not tell who sent a signal (macOS, Windows), workers obey every SIGTERM.

    Args:
        worker_id: the worker's number, from 0.
        then: another `worker_init_fn`, called last.
    """
    main = parent_process()
    if main is not None:
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # threads inherit the mask
            threading.Thread(target=_obey, args=(main.pid,), name="heliograph-signals", daemon=True).start()
        threading.Thread(target=_follow, args=(main,), name="heliograph-main-process", daemon=True).start()
    if hasattr(signal, "SIGUSR1"):  # Windows has none
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if then is not None:
        then(worker_id)


def _follow(main: Any) -> None:
    """Wait until the main process has ended, then leave.

    Its sentinel says so, however early that was; but not while another process lives that the main one forked later,
    which holds the other end, too. Nor does the parent change in a worker that a fork server has started.
    """
    is_child = os.getppid() == main.pid
    while not wait([main.sentinel], LOOK):
        if (is_child and os.getppid() != main.pid) or not _exists(main.pid):
            break
    os._exit(1)


def _exists(pid: int) -> bool:
    if os.name != "posix":  # there the sentinel is the process, and signal 0 is Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it has another user now
        return True
    return True


def _obey(main: int | None) -> None:
    """Take every SIGTERM that comes; leave upon one of the main process."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main:
        pass
    os._exit(0)


def shielded(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a loader whose workers end with this process, and leave it to act upon signals to all."""
    own = copy(loader)
    own.__dict__["_iterator"] = None  # persistent workers are not shared
    init = loader.worker_init_fn
    if not isinstance(init, partial) or init.func is not prepare_worker:
        own.worker_init_fn = partial(prepare_worker, then=init)
    return own
