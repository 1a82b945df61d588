"""Numbered files of runs with the same path: `log.csv`, then `log-2.csv` and so on."""

from __future__ import annotations

from glob import escape
from itertools import count
from pathlib import Path


def file_path(path: str | Path, owner: str, example: str) -> Path:
    """Return the path of a file; raise ValueError if it is a folder."""
    if Path(path).is_dir():
        raise ValueError(f"{owner} writes a file, but {path} is a folder: pass a path such as {path}/{example}.")
    return Path(path)


def find_numbered(path: Path, end: str = "") -> list[Path]:
    """Return the existing files, in the order of their numbers.

    Args:
        path: the first of them.
        end: the end of the names, after the number; the suffix by default.
    """
    end = end or path.suffix
    start = path.name.removesuffix(end)
    numbers = {path: 1}
    for candidate in path.parent.glob(f"{escape(start)}-*{escape(end)}"):
        number = candidate.name.removeprefix(f"{start}-").removesuffix(end)
        if number.isdecimal():
            numbers[candidate] = int(number)
    return [candidate for candidate in sorted(numbers, key=numbers.__getitem__) if candidate.is_file()]


def make_numbered(path: Path, end: str = "") -> Path:
    """Create an empty file with the first free number in an existing folder; return its path."""
    end = end or path.suffix
    start = path.name.removesuffix(end)
    for number in count(1):
        chosen = path if number == 1 else path.with_name(f"{start}-{number}{end}")
        try:
            chosen.touch(exist_ok=False)
        except FileExistsError:
            continue
        return chosen
    raise AssertionError


def is_text(path: Path) -> bool:
    """Return True if the complete file is UTF-8 text."""
    with path.open(encoding="utf-8") as file:
        try:
            for _ in file:
                pass
        except UnicodeDecodeError:
            return False
    return True


def name_other(path: Path, chosen: Path) -> str:
    """Return the note about a run that is logged in another file than the requested one."""
    content = "another run" if is_text(path) else "bytes that are not text"
    return f"{path} has {content}: this run is logged in {chosen}"
