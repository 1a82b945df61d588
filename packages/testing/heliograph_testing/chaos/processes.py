"""The processes of an attempt: a script, or forks of this process that call a function."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn


class ForkedChild:
    """A fork with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


Child = subprocess.Popen[bytes] | ForkedChild  # leads its own process group
Start = Callable[[Path, Mapping[str, str], Path], Child]


def script_starter(script: Path, arguments: Sequence[str]) -> Start:
    """Return a function that starts a script in a folder, with variables and an output file."""

    def start(folder: Path, variables: Mapping[str, str], output: Path) -> Child:
        with output.open("ab") as file:
            return subprocess.Popen(  # noqa: S603  # the user's own script
                [sys.executable, str(script), *arguments],
                cwd=folder,
                env={**os.environ, **variables, "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    return start


def function_starter(train: Callable[[], object]) -> Start:
    """Return a function that forks this process and calls `train` in the fork."""

    def start(folder: Path, variables: Mapping[str, str], output: Path) -> Child:
        if child := os.fork():
            with suppress(OSError):  # the child has set it already
                os.setpgid(child, child)
            return ForkedChild(child)
        become(partial(_train_in, folder, variables, train), output)

    return start


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


def _train_in(folder: Path, variables: Mapping[str, str], train: Callable[[], object]) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)  # Python reads the variable only at its start
    train()


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


def end_group(child: Child) -> None:
    with suppress(ProcessLookupError, PermissionError):  # no process is left; macOS raises PermissionError
        os.killpg(child.pid, signal.SIGKILL)
