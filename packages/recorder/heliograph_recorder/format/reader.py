"""Read a recording, even if its process was killed or the file is damaged."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from .checksum import format_line, is_intact, parse_array, parse_line, parse_lines
from .lines import FORMAT, decode, decode_attempt
from .records import AttemptRecord, Batches, Entry, Recording, slice_block
from .tail import Rows, notes_in, parse_tail, read_tail


class Follower:
    """A recording as it is at the last `update`.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parser, self._tail = Parser(path), b""
        self._remarks: list[str] = []

    def update(self) -> bool:
        before = self._parser.size, self._tail
        if self.path.stat().st_size < self._parser.size:
            self._parser = Parser(self.path)
        self._tail, added, self._remarks = read_files(self.path, self._parser.size)
        with gc_paused():
            self._parser.add(added, is_end=False)
        return (self._parser.size, self._tail) != before

    def recording(self) -> Recording:
        parsed = self._parser.attempts
        last = [self._with_tail(each.copy()) for each in parsed[-1:]]
        return Recording(self.path, tuple(each.finish() for each in [*parsed[:-1], *last]))

    def _with_tail(self, last: ParsedAttempt) -> ParsedAttempt:
        last.damage += self._remarks
        try:
            rows = parse_tail(self._tail)
        except ValueError as error:
            last.damage.append(str(error))
        else:
            for line in () if rows is None else missing_lines([last], rows):
                last.add(parse_line(line))
        return last


PLAIN = ("happened", "asked")  # of the most lines: an entry each, and no batches
MIN_BATCHES, BATCHES_PER_BYTE = 1_000_000, 8  # a line of 4,096 batches has several hundred bytes
UNKNOWN = AttemptRecord("", "train", "", "", 1, None, None, (), (), {}, {}, losses=False, plan={}, entries=())


@dataclass(slots=True)
class _Mark:
    """A position among the entries, after so many batches of a block whose line comes later."""

    number: int
    batch: int
    blocks: list[Batches] = field(default_factory=list)


class _BatchLimit:
    """How many batches a file of some size may hold: a short line can name very many that are equal."""

    def __init__(self) -> None:
        self._left = MIN_BATCHES

    def grow(self, size: int) -> None:
        self._left += size * BATCHES_PER_BYTE

    def count(self, items: list[Any]) -> None:
        match items:
            case ["batches", _, _, _, _, int(rows), *_] | ["digests", _, _, int(rows), *_]:
                if rows > self._left:
                    raise ValueError("more batches than a file of this size can hold")
                self._left -= rows


@dataclass(slots=True)
class ParsedAttempt:
    """An attempt whose lines are being read.

    Attributes:
        about: the attempt without entries.
        entries: in order; a mark is replaced by the batches that come there.
        damage: what could not be read, in words.
        lines: those that the tail may have, too.
        parts: which blocks of batches were read, and which parts of them.
        marks: those whose block is not read yet.
    """

    about: AttemptRecord
    entries: list[Entry | _Mark] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    lines: set[bytes] = field(default_factory=set)
    parts: set[tuple[int, int]] = field(default_factory=set)
    marks: list[_Mark] = field(default_factory=list)

    def add(self, items: list[Any]) -> None:
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
        self.marks = [mark for mark in self.marks if mark.number == number]
        done, end = 0, len(block)
        for mark in self.marks:
            until = min(mark.batch - block.first.batch, end)
            if until > done:
                mark.blocks.append(slice_block(block, done, until))
                done = until
        if done < end:
            self.entries.append(slice_block(block, done, end))

    def copy(self) -> ParsedAttempt:
        marks = {id(mark): replace(mark, blocks=[*mark.blocks]) for mark in self.marks}
        entries = [marks.get(id(entry), entry) for entry in self.entries]
        parts, lines = {*self.parts}, self.lines
        return ParsedAttempt(self.about, entries, [*self.damage], lines, parts, [*marks.values()])

    def finish(self) -> AttemptRecord:
        entries: list[Entry] = []
        for entry in self.entries:
            if isinstance(entry, _Mark):
                entries += entry.blocks
            else:
                entries.append(entry)
        return replace(self.about, entries=tuple(entries), damage=tuple(self.damage))


class Parser:
    """Parses a recording, each line on its own, as far as it was written.

    Args:
        path: of the file, for messages.

    Attributes:
        attempts: those that were read so far.
        size: the bytes of the lines that were read.
    """

    def __init__(self, path: Path) -> None:
        self.attempts: list[ParsedAttempt] = []
        self.size = 0
        self._path, self._limit, self._number = path, _BatchLimit(), 0

    def add(self, data: bytes, *, is_end: bool) -> None:
        if not is_end:
            data = data[: data.rfind(b"\n") + 1]
            if not data:
                return
        lines, head_is_damaged = data.split(b"\n"), False
        if not self._number:
            head_is_damaged = _check_head(self._path, lines)
            del lines[0]
            self._number = 1
        self.size += len(data)
        self._limit.grow(len(data))
        last = lines.pop() if lines else b""  # what follows the last newline
        for line, items in zip(lines, parse_lines(lines), strict=True):
            self._number += 1
            if line:
                self._add_line(line, items)
        if last:
            self._number += 1
            self._add_line(last, next(parse_lines([last])), " (the last, cut short)")
        if head_is_damaged:
            self.attempts[0].damage.insert(0, "line 1: damaged")

    def _add_line(self, line: bytes, items: list[Any] | ValueError, end: str = "") -> None:
        attempts = self.attempts
        try:
            if isinstance(items, ValueError):
                raise items
            if not attempts or items[0] not in PLAIN:
                self._add(items)
            else:
                attempts[-1].entries.append(decode(items))
            if items[0] != "batches":  # those are known by their numbers
                attempts[-1].lines.add(line)
        except ValueError as error:
            if line.startswith(b'["attempt"') or not attempts:
                attempts.append(ParsedAttempt(UNKNOWN))
            attempts[-1].damage.append(f"line {self._number}{end}: {error}")

    def _add(self, items: list[Any]) -> None:
        attempts = self.attempts
        if items[0] == "attempt":
            attempts.append(ParsedAttempt(decode_attempt(items)))
            return
        if not attempts:
            attempts.append(ParsedAttempt(UNKNOWN, damage=["the first line of the attempt is missing"]))
        self._limit.count(items)
        attempts[-1].add(items)


def missing_lines(attempts: Sequence[ParsedAttempt], rows: Rows) -> list[str]:
    last = attempts[-1] if attempts else None
    if last is None or last.about.name not in (rows.attempt, ""):  # "": the attempt's first line is damaged
        return []
    notes = [line for line in (format_line(*items) for items in rows.notes) if line.encode() not in last.lines]
    parts = [items for part, items in enumerate(rows.arrays()) if (rows.number, part) not in last.parts]
    return notes + [format_line(*items) for items in parts]


def _check_head(path: Path, lines: Sequence[bytes]) -> bool:
    match _parse_head(lines[0]):
        case ["recording", int(version)] if version == FORMAT:
            return False
        case ["recording", int(version)]:
            raise ValueError(
                f"{path} has format {version}, this version reads {FORMAT}: update heliograph, or use the version that "
                f"wrote it."
            )
    if any(map(is_intact, lines[1:])):
        return True
    what = "is not a recording of heliograph" if any(lines) else "is empty: the run was killed before it began"
    raise ValueError(f"{path} {what}. Give the file that Recorder wrote, or its folder.")


def _parse_head(line: bytes) -> list[Any]:
    try:
        return parse_array(line.partition(b"\t")[0])
    except ValueError:
        return []


@contextmanager
def gc_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


SUFFIX = ".recording"
SHOWN = 10  # sentences about what could not be read
READINGS = 10  # of the files of a run that changes them each time


@gc_paused()
def read(path: str | Path) -> Recording:
    """Return the content of a recording.

    Args:
        path: the file; or a folder, of which the newest recording is read.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is not a recording, or has another format.
        TypeError: `path` is not a path.
    """
    if not isinstance(path, str | PathLike):
        raise TypeError(f"A recording is the file that Recorder wrote, or its folder, got {path!r}.")
    file = find_recording(Path(path))
    rows: Rows | None = None
    tail, content, damage = read_files(file)
    try:
        rows = parse_tail(tail)
    except ValueError as error:
        damage.append(str(error))
    attempts = _parse_file(file, content)
    for line in () if rows is None else missing_lines(attempts, rows):
        attempts[-1].add(parse_line(line))
    for last in attempts[-1:]:
        last.damage += damage
    return Recording(file, tuple(each.finish() for each in attempts))


def find_recording(path: Path) -> Path:
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
    rows = parse_tail(read_tail(path))
    attempts = _parse_file(path, path.read_bytes())
    return [] if rows is None else missing_lines(attempts, rows)


def read_files(path: Path, begin: int = 0) -> tuple[bytes, bytes, list[str]]:
    for _ in range(READINGS):
        size, former, tail = path.stat().st_size, read_tail(path), read_tail(path)
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read()
        if begin + len(content) == size and notes_in(former) == notes_in(tail):
            return tail, content, []
    return tail, content, [f"the run wrote to it during each of {READINGS} readings: the newest entries may be wrong"]


def _parse_file(path: Path, content: bytes) -> list[ParsedAttempt]:
    parser = Parser(path)
    parser.add(content, is_end=True)
    return parser.attempts


def damage_in_short(attempt: AttemptRecord) -> list[str]:
    damage = attempt.damage
    return [*damage[:SHOWN], *[f"and {len(damage) - SHOWN:,} more"] * (len(damage) > SHOWN)]


def damage_of(attempts: Iterable[AttemptRecord]) -> list[str]:
    return [f"attempt {number}: {text}" for number, each in enumerate(attempts, 1) for text in damage_in_short(each)]
