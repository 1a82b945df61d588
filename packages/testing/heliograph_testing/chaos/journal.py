"""The journal of a rank: faults, losses, saves and ends of trainings; it outlives its processes."""

from __future__ import annotations

import os
import pickle
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
_trainings = Counter[int]()  # by process, because a fork counts from 0


class Journal:
    """A file with an entry per line, written at once because a kill may follow."""

    def __init__(self, path: Path) -> None:
        self._write = os.write  # a fault of the disk may replace it later
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._training = _trainings[os.getpid()]
        _trainings[os.getpid()] += 1

    def note(self, what: str, **facts: Any) -> None:
        entry = {"what": what, "training": self._training, **facts}
        self._write(self._file, b64encode(pickle.dumps(entry)) + b"\n")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}") if rank else path


def read(path: Path, start: int = 0) -> Iterator[Entry]:
    # A kill may have truncated a line.
    for line in path.read_bytes()[start:].splitlines() if path.exists() else ():
        try:
            yield pickle.loads(b64decode(line))  # noqa: S301  # written by this program
        except (ValueError, EOFError, pickle.UnpicklingError):
            continue
