"""Read a recording, even if its process was killed or the file is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from .checksum import format_line, is_intact, parse_array, parse_line
from .gc_pause import gc_paused
from .lines import FORMAT, decode, decode_attempt
from .records import AttemptRecord, Batches, Entry, Recording
from .tail import Rows, notes_in, parse_tail, read_tail
from .walk import slice_block

SUFFIX = ".recording"
MIN_BATCHES, BATCHES_PER_BYTE = 1_000_000, 8  # a line of 4,096 batches has several hundred bytes
READINGS = 10  # of the files of a run that changes them each time
UNKNOWN = AttemptRecord("", "train", "", "", 1, None, None, (), (), {}, {}, losses=False, plan={}, entries=())


@dataclass(slots=True)
class _Mark:
    """A position among the entries, after so many batches of a block whose line comes later."""

    number: int
    batch: int
    blocks: list[Batches] = field(default_factory=list)


class _BatchLimit:
    """How many batches a file of some size may hold: a short line can name very many that are equal."""

    def __init__(self, size: int) -> None:
        self._left = MIN_BATCHES + size * BATCHES_PER_BYTE

    def count(self, items: list[Any]) -> None:
        """Raise ValueError if the batches of a line are too many."""
        match items:
            case ["batches", _, _, _, _, int(rows), *_] | ["digests", _, _, int(rows), *_]:
                if rows > self._left:
                    raise ValueError("more batches than a file of this size can hold")
                self._left -= rows


@dataclass(slots=True)
class _Attempt:
    """An attempt whose lines are being read."""

    about: AttemptRecord
    entries: list[Entry | _Mark] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    lines: set[bytes] = field(default_factory=set)
    parts: set[tuple[int, int]] = field(default_factory=set)
    marks: list[_Mark] = field(default_factory=list)

    def add(self, items: list[Any]) -> None:
        """Add a line's array; a part of a block that was added before is ignored."""
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
            self._add_block(entry, items[1])
        else:
            self.entries.append(entry)

    def _add_block(self, block: Batches, number: int) -> None:
        """Add the batches of a block, in order with the entries that were written before it."""
        self.marks = [mark for mark in self.marks if mark.number == number]
        done, end = 0, len(block)
        for mark in self.marks:
            until = min(mark.batch - block.first.batch, end)
            if until > done:
                mark.blocks.append(slice_block(block, done, until))
                done = until
        if done < end:
            self.entries.append(slice_block(block, done, end))

    def finish(self) -> AttemptRecord:
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
    """Return the content of a recording.

    Args:
        path: the file; or a folder, of which the newest recording is read.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is not a recording, or has a newer format.
        TypeError: `path` is not a path.
    """
    if not isinstance(path, str | PathLike):
        raise TypeError(f"A recording is the file that Recorder wrote, or its folder, got {path!r}.")
    file = find_recording(Path(path))
    rows: Rows | None = None
    tail, content, damage = _read_files(file)
    try:
        rows = parse_tail(tail)
    except ValueError as error:
        damage.append(str(error))
    attempts = _parse_file(file, content)
    for line in () if rows is None else _missing_lines(attempts, rows):
        attempts[-1].add(parse_line(line))
    for last in attempts[-1:]:
        last.damage += damage
    return Recording(file, tuple(each.finish() for each in attempts))


def find_recording(path: Path) -> Path:
    """Return the path if it is a file, else the newest recording in that folder.

    Raises:
        FileNotFoundError: there is none.
    """
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(
                f"There is no recording at {path}: give the file that Recorder wrote, or its folder."
            )
        return path
    found = path.iterdir()  # raises where this user may not read it; glob would find nothing
    files = [file for file in found if file.name.endswith(SUFFIX) and file.stat().st_size]
    if not files:
        raise FileNotFoundError(
            f"The folder {path} holds no recording, no file *{SUFFIX}: was a Recorder among the plugins?"
        )
    return max(files, key=lambda file: (file.stat().st_mtime_ns, file.name))


def read_leftover(path: Path) -> list[str]:
    """Return the lines of a killed run that are in the tail but not in the recording.

    Raises:
        ValueError: it is not a recording, has a newer format, or the tail is damaged.
    """
    rows = parse_tail(read_tail(path))
    attempts = _parse_file(path, path.read_bytes())
    return [] if rows is None else _missing_lines(attempts, rows)


def _read_files(path: Path) -> tuple[bytes, bytes, list[str]]:
    """Return the contents of a recording's tail and of its file, of one moment although a run may be writing them.

    Where each reading was disturbed, the last counts, and a sentence says so.

    That is so where the run does nothing meanwhile but add batches: no note and no line, which would come after batches
    that were not read; nor does it begin another block then, which it does after writing the lines of the former.
    """
    for _ in range(READINGS):
        size, former, tail = path.stat().st_size, read_tail(path), read_tail(path)
        content = path.read_bytes()
        if len(content) == size and notes_in(former) == notes_in(tail):
            return tail, content, []
    return tail, content, [f"the run wrote to it during each of {READINGS} readings: the newest entries may be wrong"]


def _missing_lines(attempts: list[_Attempt], rows: Rows) -> list[str]:
    last = attempts[-1] if attempts else None
    if last is None or last.about.name not in (rows.attempt, ""):  # "": the attempt's first line is damaged
        return []
    notes = [line for line in (format_line(*items) for items in rows.notes) if line.encode() not in last.lines]
    parts = [items for part, items in enumerate(rows.arrays()) if (rows.number, part) not in last.parts]
    return notes + [format_line(*items) for items in parts]


def _parse_file(path: Path, content: bytes) -> list[_Attempt]:
    """Parse each line of a file on its own.

    Raises:
        ValueError: it is not a recording, or has a newer format.
    """
    limit, lines = _BatchLimit(len(content)), content.split(b"\n")
    head_is_damaged = _check_head(path, lines)
    attempts: list[_Attempt] = []
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        try:
            _add_line(attempts, parse_line(line), limit)
            attempts[-1].lines.add(line)
        except ValueError as error:
            if line.startswith(b'["attempt"') or not attempts:
                attempts.append(_Attempt(UNKNOWN))
            end = " (the last, cut short)" if number == len(lines) else ""
            attempts[-1].damage.append(f"line {number}{end}: {error}")
    if head_is_damaged:
        attempts[0].damage.insert(0, "line 1: damaged")
    return attempts


def _add_line(attempts: list[_Attempt], items: list[Any], limit: _BatchLimit) -> None:
    if items[0] == "attempt":
        attempts.append(_Attempt(decode_attempt(items)))
        return
    if not attempts:
        attempts.append(_Attempt(UNKNOWN, damage=["the first line of the attempt is missing"]))
    limit.count(items)
    attempts[-1].add(items)


def _check_head(path: Path, lines: Sequence[bytes]) -> bool:
    """Return whether the first line is damaged, if the file is a recording nevertheless.

    Raises:
        ValueError: it is not a recording, or has a newer format.
    """
    match _parse_head(lines[0]):
        case ["recording", int(version)] if 0 < version <= FORMAT:
            return False
        case ["recording", int(version)] if version > FORMAT:
            raise ValueError(f"{path} has format {version}, this version reads {FORMAT}: update heliograph.")
    if any(map(is_intact, lines[1:])):
        return True
    what = "is not a recording of heliograph" if any(lines) else "is empty: the run was killed before it began"
    raise ValueError(f"{path} {what}. Give the file that Recorder wrote, or its folder.")


def _parse_head(line: bytes) -> list[Any]:
    """Return the first line's array, else an empty one; a newer format may have another checksum."""
    try:
        return parse_array(line.partition(b"\t")[0])
    except ValueError:
        return []
