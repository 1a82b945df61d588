"""The lines of a recording become attempts, while the file grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .checksum import format_line, is_intact, parse_array, parse_lines
from .lines import FORMAT, decode, decode_attempt
from .records import AttemptRecord, Batches, Entry
from .tail import Rows
from .walk import slice_block

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
