"""The processes of an attempt: forks of this process that call a function or become a script."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn


class ForkedChild:
    """A fork of this process that leads its own process group."""

    def __init__(self, action: Callable[[], object], output: Path) -> None:
        self.pid = os.fork()
        self._status: int | None = None
        if not self.pid:
            become(action, output)
        with suppress(OSError):  # the child has set it already
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def end_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # no process is left; macOS raises PermissionError
            os.killpg(self.pid, signal.SIGKILL)


def become(action: Callable[[], object], output: Path) -> NoReturn:
    """In a fork: lead a process group, call a function and exit, with status 1 after an error.

    Args:
        action: the function; its own exit status is kept.
        output: the file for the output.
    """
    status = 1
    try:
        os.setpgid(0, 0)
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)  # the parent may have replaced them
        action()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  # printed, and in the status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def train_in(folder: Path, variables: Mapping[str, str], train: Callable[[], object]) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)  # Python reads the variable only at its start
    train()


def run_script(script: Path, arguments: Sequence[str]) -> NoReturn:
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.execv(sys.executable, [sys.executable, str(script), *arguments])  # noqa: S606  # the user's own script


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    # The variables that torch.distributed reads.
    if ranks == 1:
        return {}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
