"""Faults that wait for an operation on files: a kill within a save, a full disk, a slow one."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from .acts import kill
from .disk import Disk
from .fault import KINDS, Fault


class DiskFaults:
    """The faults whose event has come, and that wait for their operation on files of a folder.

    Args:
        folder: whose files.
        note: called with the number of a fault that acts now, and what it does.
        spare: a path whose operations are not counted.
    """

    def __init__(self, folder: Path, note: Callable[[int, str], None], spare: Path | None) -> None:
        self._note, self._spare = note, str(spare)
        self._waiting: deque[tuple[int, Fault]] = deque()
        self._seen = 0  # operations since the first one began to wait
        self._disk = Disk(folder, self._operate)
        self._disk.apply()

    def add(self, number: int, fault: Fault) -> None:
        """Let a fault wait; one after the other they act."""
        self._waiting.append((number, fault))

    def close(self) -> None:
        """Put the functions of the system back."""
        self._disk.undo()

    def _operate(self, kind: str, path: str) -> None:
        if not self._waiting or path == self._spare:
            return
        number, fault = self._waiting[0]
        self._seen += 1
        first = max(1, fault.operation)
        if self._seen < first:
            return
        if self._seen == first:
            self._note(number, f"{KINDS[fault.kind].text}, from {kind} {Path(path).name} on")
        if self._seen == first + fault.times - 1:
            self._waiting.popleft()
            self._seen = 0
        if fault.kind == "full-disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if fault.kind == "slow-disk":
            time.sleep(fault.seconds)
        else:
            kill()
