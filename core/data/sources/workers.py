"""Worker processes of loaders: they leave signals to their main process, and never outlive it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any

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
