"""Read a recording, whatever happened to the process that wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from .checksum import array, is_sealed, parse
from .gc_pause import gc_paused
from .lines import FORMAT, decode, decode_attempt
from .records import Attempt, Batches, Entry, Recording
from .tail import Rows, read_tail
from .walk import Walked, walk
from .walk import part as cut

__all__ = ["SUFFIX", "Walked", "found", "leftover", "read", "walk"]
SUFFIX = ".recording"
LEAST_BATCHES, BATCHES_PER_BYTE = 1_000_000, 8  # a line of 4,096 takes several hundred bytes
UNKNOWN = Attempt("", "train", "", "", 1, None, None, (), (), {}, {}, losses=False, plan={}, entries=())


@dataclass(slots=True)
class _Mark:
    """A place among the entries that belongs behind some batches of a block which comes later."""

    number: int
    batch: int
    blocks: list[Batches] = field(default_factory=list)


class _Room:
    """How many batches a file of some size may claim to hold: a short line can name very many that are all alike."""

    def __init__(self, size: int) -> None:
        self._batches = LEAST_BATCHES + size * BATCHES_PER_BYTE

    def take(self, items: list[Any]) -> None:
        """Raise ValueError where there is no room for the batches of a line."""
        match items:
            case ["batches", _, _, _, _, int(rows), *_]:
                if rows > self._batches:
                    raise ValueError("more batches than a file of its size holds")
                self._batches -= rows


@dataclass(slots=True)
class _Attempt:
    """An attempt whose lines are being read."""

    about: Attempt
    entries: list[Entry | _Mark] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    parts: set[tuple[int, int]] = field(default_factory=set)
    marks: list[_Mark] = field(default_factory=list)

    def take(self, items: list[Any]) -> None:
        """Take a line in; a block that is there already is not taken twice."""
        match items:
            case ["batches", int(number), int(part), *_] if (number, part) in self.parts:
                return
            case ["behind", int() as number, int() as batch]:  # int(number) would look for __match_args__ every time
                mark = _Mark(number, batch)
                self.marks.append(mark)
                self.entries.append(mark)
                return
            case ["lost", int(lines)]:
                self.damage.append(f"{lines} lines could not be written")
                return
        entry = decode(items)
        if isinstance(entry, Batches):
            self.parts.add((items[1], items[2]))
            self._place(entry, items[1])
        else:
            self.entries.append(entry)

    def _place(self, block: Batches, number: int) -> None:
        """Put the batches of a block where they came about: between the entries that were written before it."""
        self.marks = [mark for mark in self.marks if mark.number == number]
        done, end = 0, len(block)
        for mark in self.marks:
            behind = min(mark.batch - block.first.batch, end)
            if behind > done:
                mark.blocks.append(cut(block, done, behind))
                done = behind
        if done < end:
            self.entries.append(cut(block, done, end))

    def finish(self) -> Attempt:
        """Return the attempt."""
        entries: list[Entry] = []
        for entry in self.entries:
            if isinstance(entry, _Mark):
                entries += entry.blocks
            else:
                entries.append(entry)
        return replace(self.about, entries=tuple(entries), damage=tuple(self.damage))


@gc_paused()
def read(path: str | Path) -> Recording:
    """Return what a recording holds.

    Args:
        path: the file; or a folder, of which the newest recording is read.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is no recording, or one of a newer format.
        TypeError: `path` is no path.
    """
    if not isinstance(path, str | PathLike):
        raise TypeError(f"A recording is the file that Recorder wrote, or its folder, got {path!r}.")
    file = found(Path(path))
    rows: Rows | None = None
    damage: list[str] = []
    try:
        rows = read_tail(file)  # first: what leaves it meanwhile is in the file by then
    except ValueError as error:
        damage.append(str(error))
    attempts = _parsed(file)
    for line in () if rows is None else _missing(attempts, rows):
        attempts[-1].take(parse(line))
    for last in attempts[-1:]:
        last.damage += damage
    return Recording(file, tuple(each.finish() for each in attempts))


def found(path: Path) -> Path:
    """Return the recording that a path means.

    Raises:
        FileNotFoundError: there is none.
    """
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"There is no recording {path}: give the file that Recorder wrote, or its folder.")
        return path
    files = [file for file in path.glob(f"*{SUFFIX}") if file.stat().st_size]
    if not files:
        raise FileNotFoundError(
            f"The folder {path} holds no recording, no file *{SUFFIX}: was a Recorder among the plugins?"
        )
    return max(files, key=lambda file: (file.stat().st_mtime_ns, file.name))


def leftover(path: Path) -> list[str]:
    """Return the lines that a killed run left beside its recording and not in it.

    Raises:
        ValueError: it is no recording, or one of a newer format, or what was left is damaged.
    """
    rows = read_tail(path)
    attempts = _parsed(path)
    return [] if rows is None else _missing(attempts, rows)


def _missing(attempts: list[_Attempt], rows: Rows) -> list[str]:
    owner = _owner(attempts, rows)
    if owner is None:
        return []
    return [line for part, line in enumerate(rows.lines()) if (rows.number, part) not in owner.parts]


def _owner(attempts: list[_Attempt], rows: Rows) -> _Attempt | None:
    """Return the attempt whose block it is: the last one, or one whose beginning is damaged."""
    last = attempts[-1] if attempts else None
    return last if last is not None and last.about.name in (rows.attempt, "") else None


def _parsed(path: Path) -> list[_Attempt]:
    """Read a file's lines, each for itself.

    Raises:
        ValueError: it is no recording, or one of a newer format.
    """
    content = path.read_bytes()
    room, lines = _Room(len(content)), content.split(b"\n")
    head_is_damaged = _check_head(path, lines)
    attempts: list[_Attempt] = []
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        try:
            _take(attempts, parse(line), room)
        except ValueError as error:
            if line.startswith(b'["attempt"') or not attempts:
                attempts.append(_Attempt(UNKNOWN))
            end = ", the last, was cut short" if number == len(lines) else ""
            attempts[-1].damage.append(f"line {number}{end}: {error}")
    if head_is_damaged:
        attempts[0].damage.insert(0, "line 1: it is damaged")
    return attempts


def _take(attempts: list[_Attempt], items: list[Any], room: _Room) -> None:
    if items[0] == "attempt":
        attempts.append(_Attempt(decode_attempt(items)))
        return
    if not attempts:
        attempts.append(_Attempt(UNKNOWN, damage=["its beginning is missing"]))
    room.take(items)
    attempts[-1].take(items)


def _check_head(path: Path, lines: Sequence[bytes]) -> bool:
    """Return whether the first line is damaged, of a file that is a recording all the same.

    Raises:
        ValueError: it is no recording, or one of a newer format.
    """
    match _head(lines[0]):
        case ["recording", int(version)] if 0 < version <= FORMAT:
            return False
        case ["recording", int(version)] if version > FORMAT:
            raise ValueError(f"{path} has format {version}, this version reads {FORMAT}: update heliograph.")
    if any(map(is_sealed, lines[1:])):
        return True
    what = "is no recording of heliograph" if any(lines) else "is empty: the run was killed before it began"
    raise ValueError(f"{path} {what}. Give the file that Recorder wrote, or its folder.")


def _head(line: bytes) -> list[Any]:
    """Return the first line's array, empty where it is none; of a newer format, the checksum may be another."""
    try:
        return array(line.partition(b"\t")[0])
    except ValueError:
        return []
