"""Copies of this process, which has imported all that they need."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

from heliograph_testing.chaos.attempts import become


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
