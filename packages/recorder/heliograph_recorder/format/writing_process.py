"""Find the process that writes a recording, without importing torch."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

CLOCK_TOLERANCE = 60.0  # seconds by which the clock may have been set since a lock was written


def lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def holder_path(path: Path) -> Path:
    return path.with_name(path.name + ".holder")


def writing_process(path: Path) -> int | None:
    """Return the process of this machine that writes a recording, 0 for none, None if unknown."""
    file = holder_path(path)
    try:
        holder, age = file.read_text(errors="replace").split(), time.time() - file.stat().st_mtime
    except OSError:
        return 0  # a writer creates it, and removes it when it closes
    if len(holder) != 2 or not holder[0].isdigit() or holder[1] != socket.gethostname():
        return None
    process = int(holder[0])
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return 0
    except PermissionError:  # a process of another user
        pass
    is_pid_reused = _age(process, age) < age - CLOCK_TOLERANCE and not _is_locked(lock_path(path))
    return 0 if is_pid_reused else process


def is_being_written(path: Path) -> bool | None:
    """Return None if unknown: the recording is a copy, or from another machine."""
    process = writing_process(path)
    return None if process is None or not (process or holder_path(path).exists()) else process > 0


def _age(process: int, default: float) -> float:
    """Return the age of a process in seconds; the default on a system without `/proc`."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return default


def _is_locked(lock: Path) -> bool:
    """Return whether a process holds a lock; True on a system without `/proc/locks`."""
    try:
        locks, inode = Path("/proc/locks").read_text().splitlines(), lock.stat().st_ino
    except OSError:
        return True
    return any(word.endswith(f":{inode}") for line in locks for word in line.split())
