"""Copies of this process, which has imported all that they need."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def become(action: Callable[[], object], output: Path) -> NoReturn:
    """In a child: lead a process group, do something and end, with status 1 where it failed."""
    status = 1
    try:
        os.setpgid(0, 0)
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        action()
        status = 0
    except BaseException:  # noqa: BLE001  # reported in the output, and by the status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def forked(action: Callable[[], object], output: Path, seconds: float) -> int:
    """Do something in a child; return how that ended, and let nothing of its group live on.

    Args:
        action: what to do.
        output: the file to which its output goes.
        seconds: after so many it is killed.

    Raises:
        TimeoutError: it had to be.
    """
    child = os.fork()
    if not child:
        become(action, output)
    os.setpgid(child, child)
    end = os.pidfd_open(child)
    ended, _, _ = select.select([end], [], [], seconds)
    os.close(end)
    os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not ended:
        raise TimeoutError(f"an attempt did not end within {seconds:g} s")
    return status
