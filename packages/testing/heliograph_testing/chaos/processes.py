"""The processes of one attempt: a script's, or copies of this process that call a function."""

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
from typing import NoReturn, Protocol


class Child(Protocol):
    """A process that leads a process group of its own."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs."""


Start = Callable[[Path, Mapping[str, str], Path], Child]


def script_starter(script: Path, arguments: Sequence[str]) -> Start:
    """Return what starts a script in a folder, with variables added to the environment, its output in a file."""

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
    """Return what calls a function in a copy of this process, which has imported all that it needs."""

    def start(folder: Path, variables: Mapping[str, str], output: Path) -> Child:
        if child := os.fork():
            with suppress(OSError):  # the child has done it
                os.setpgid(child, child)
            return Copy(child)
        become(partial(_train_in, folder, variables, train), output)

    return start


class Copy:
    """A copy of this process.

    Args:
        pid: its number.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs."""
        if self._status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if found else None
        return self._status


def become(action: Callable[[], object], output: Path) -> NoReturn:
    """In a copy of a process: lead a process group, do something and end, with status 1 where it failed.

    Args:
        action: what to do; one that exits has its own status.
        output: the file to which its output goes.
    """
    status = 1
    try:
        os.setpgid(0, 0)
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)  # who has forked may have replaced them
        action()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  # in the output, and by the status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _train_in(folder: Path, variables: Mapping[str, str], train: Callable[[], object]) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)  # which Python has read long ago
    train()


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what torch reads of the environment in one of several processes; nothing for a single one."""
    if ranks == 1:
        return {}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def end_group(child: Child) -> None:
    """Kill what is left of the process group that a child leads."""
    with suppress(ProcessLookupError, PermissionError):  # nothing is left; macOS says it otherwise
        os.killpg(child.pid, signal.SIGKILL)
