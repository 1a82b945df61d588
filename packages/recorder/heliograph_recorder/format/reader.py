"""Read a recording, even if its process was killed, the file is damaged, or the run still writes it.

This needs no torch, so that `explain` and `watch` start fast.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .lines import FORMAT, decode, decode_attempt, parse_array, parse_line
from .records import AttemptRecord, Entry, Recording

SUFFIX = ".recording"
SHOWN = 10  # texts on damage
CLOCK_TOLERANCE = 60.0  # seconds by which the clock may have been set since a lock was written
UNKNOWN = AttemptRecord("", "train", "", "", 1, None, None, (), (), {}, {}, losses=False, plan={}, entries=())


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector: it would traverse the growing number of records, which form no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@gc_paused()
def read(path: str | Path) -> Recording:
    """Read a recording.

    Args:
        path: the file, or a folder: the newest recording in it.

    Raises:
        FileNotFoundError: there is no recording.
        ValueError: the file is not a recording, or has another format.
        TypeError: `path` is not a path.
    """
    file = find_recording(Path(path))
    parser = Parser(file)
    parser.add(file.read_bytes(), is_end=True)
    return parser.recording()


def find_recording(path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(
                f"There is no recording at {path}: give the file that Recorder wrote, or its folder."
            )
        return path
    content = path.iterdir()  # unlike glob, it raises if the user may not read the folder
    files = [file for file in content if file.name.endswith(SUFFIX) and file.stat().st_size]
    if not files:
        raise FileNotFoundError(
            f"The folder {path} has no recording (*{SUFFIX}). Add Recorder({str(path)!r}) to the plugins, or give "
            f"another folder."
        )
    return max(files, key=lambda file: (file.stat().st_mtime_ns, file.name))


def damage_in_short(attempt: AttemptRecord) -> list[str]:
    damage = attempt.damage
    return [*damage[:SHOWN], *[f"and {len(damage) - SHOWN:,} more"] * (len(damage) > SHOWN)]


def damage_of(attempts: Iterable[AttemptRecord]) -> list[str]:
    return [
        f"attempt {number}: {text}" for number, attempt in enumerate(attempts, 1) for text in damage_in_short(attempt)
    ]


class Follower:
    """Read a recording that a run is writing; each update parses only the new lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parser = Parser(path)

    def update(self) -> bool:
        """Return whether anything was added. A file that was replaced is read from its beginning."""
        before = self._parser.size
        if self.path.stat().st_size < before:
            self._parser = Parser(self.path)
        with self.path.open("rb") as file, gc_paused():
            file.seek(self._parser.size)
            self._parser.add(file.read(), is_end=False)
        return self._parser.size != before

    def recording(self) -> Recording:
        return self._parser.recording()


@dataclass(slots=True)
class ParsedAttempt:
    """An attempt whose lines are being read.

    Attributes:
        header: the attempt without entries.
        entries: in order.
        damage: descriptions of unreadable lines.
        has_gap: whether entries follow an unreadable line.
    """

    header: AttemptRecord
    entries: list[Entry] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    has_gap: bool = False

    def finish(self) -> AttemptRecord:
        return replace(self.header, entries=tuple(self.entries), damage=tuple(self.damage), has_gap=self.has_gap)


class Parser:
    """Parse each line of a recording independently, while the file grows.

    Attributes:
        attempts: the attempts so far.
        size: the number of bytes that were parsed.
    """

    def __init__(self, path: Path) -> None:
        self.attempts: list[ParsedAttempt] = []
        self.size = 0
        self._path, self._number = path, 0

    def recording(self) -> Recording:
        return Recording(self._path, tuple(attempt.finish() for attempt in self.attempts))

    def add(self, data: bytes, *, is_end: bool) -> None:
        """Parse the bytes after `size`. A last line without a newline is damaged if `is_end`, else left for later."""
        end = len(data) if is_end else data.rfind(b"\n") + 1
        self.size += end
        if is_end or end:
            *lines, last = data[:end].split(b"\n")
            for line in lines:
                self._add_line(line)
            if last or not self._number:
                self._add_line(last, " (the last, cut short)")

    def _add_line(self, line: bytes, suffix: str = "") -> None:
        attempts = self.attempts
        self._number += 1
        if self._number == 1:
            check_head(self._path, line)
        elif line:
            try:
                self._add(parse_line(line))
            except ValueError as error:
                if line.startswith(b'["attempt"') or not attempts:
                    attempts.append(ParsedAttempt(UNKNOWN))
                attempts[-1].damage.append(f"line {self._number}{suffix}: {error}")

    def _add(self, items: list[Any]) -> None:
        attempts = self.attempts
        if items[0] == "attempt":
            attempts.append(ParsedAttempt(decode_attempt(items)))
            return
        if not attempts:
            attempts.append(ParsedAttempt(UNKNOWN, damage=["the first line of the attempt is missing"]))
        attempt, entry = attempts[-1], decode(items)
        attempt.entries.append(entry)
        attempt.has_gap = attempt.has_gap or bool(attempt.damage)


def check_head(path: Path, line: bytes) -> None:
    """Raise ValueError if the first line of a file is not the one of a recording of this format."""
    try:
        kind, version = parse_array(line.partition(b"\t")[0])  # unverified: another format may have another checksum
    except ValueError:
        kind = version = None
    if kind != "recording":
        problem = "is not a recording of heliograph" if line else "is empty: the run was killed before it began"
        raise ValueError(f"{path} {problem}. Give the file that Recorder wrote, or its folder.")
    if version != FORMAT:
        raise ValueError(
            f"{path} has format {version}, this version reads {FORMAT}: update heliograph, or use the version that "
            f"wrote it."
        )


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
