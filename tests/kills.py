"""Trainings that kill themselves, in children of one process that has imported everything."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import heliograph as h


class Killer(h.Plugin):
    """Counts how often it comes to a place, and kills the process there at the so-many-th time."""

    def __init__(self, where: str, number: int) -> None:
        self.where, self.left = where, number

    def act(self, where: str) -> None:
        """Count one time, if that is the place."""
        if self.where == where:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


def in_a_child(act: Callable[[], object], *, killed: bool, about: str) -> None:
    """Act in a forked child, and wait for its end; exit with what it is about where it did not end as it should."""
    if (child := os.fork()) == 0:
        act()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if was_killed != killed or (not killed and status):
        sys.exit(f"{about} ended with status {status}")
