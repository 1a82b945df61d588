"""Files of runs that are given one path: `log.csv`, and `log-2.csv` and so on for those that come later."""

from __future__ import annotations

from glob import escape
from itertools import count
from pathlib import Path


def file_path(path: str | Path, owner: str, example: str) -> Path:
    """Return the path of a file.

    Raises:
        ValueError: a folder is there.
    """
    if Path(path).is_dir():
        raise ValueError(
            f"{owner} writes a file, and {path} is a folder: give the path of a file, as in {path}/{example}."
        )
    return Path(path)


def find_numbered(path: Path, end: str = "") -> list[Path]:
    """Return the files that there are, in the order of their numbers.

    Args:
        path: the first of them.
        end: what its name ends with, after the number; its suffix by default.
    """
    end = end or path.suffix
    start = path.name.removesuffix(end)
    numbers = {path: 1}
    for each in path.parent.glob(f"{escape(start)}-*{escape(end)}"):
        number = each.name.removeprefix(f"{start}-").removesuffix(end)
        if number.isdecimal():
            numbers[each] = int(number)
    return [each for each in sorted(numbers, key=numbers.__getitem__) if each.is_file()]


def make_numbered(path: Path, end: str = "") -> Path:
    """Make an empty file that no other run has, in a folder that there is, and return its path."""
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
    """Return whether a file holds text from its beginning to its end: junk bytes are not a log, nor the end of one."""
    with path.open(encoding="utf-8") as file:
        try:
            for _ in file:
                pass
        except UnicodeDecodeError:
            return False
    return True


def name_other(path: Path, chosen: Path) -> str:
    """Say why a run is logged in another file than the one that was given."""
    held = "another run" if is_text(path) else "bytes that are not text"
    return f"{path} holds {held}: this one is logged in {chosen}"
