"""Read a recording, even if its process was killed or the file is damaged."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from .checksum import parse_line
from .gc_pause import gc_paused
from .parser import ParsedAttempt, Parser, missing_lines
from .records import AttemptRecord, Recording
from .tail import Rows, notes_in, parse_tail, read_tail

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
