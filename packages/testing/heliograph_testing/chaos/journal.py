"""The journal of a rank: what acted, every loss, every end; it outlives the processes that write it."""

from __future__ import annotations

import json
import os
import pickle
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heliograph.spi import Fact

Entry = dict[str, Any]


class Journal:
    """Lines of JSON in a file, one for each entry; each is written at once, as the next thing may be a kill.

    Args:
        path: of the file; what it holds already was written by processes before this one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._write = os.write  # before a fault of the disk replaces it
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, what: str, **facts: Any) -> None:
        """Add an entry."""
        self._write(self._file, json.dumps({"what": what, **facts}).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def of_rank(path: Path, rank: int) -> Path:
    """Return the journal of a rank, by the path of that of the main one."""
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}") if rank else path


def read(path: Path) -> Iterator[Entry]:
    """Yield the entries of a journal, none where there is no file; a kill may have cut the last line short."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def refusal_in(paths: Iterable[Path]) -> str:
    """Return why a training was refused at its start, by its journals; empty where it was not."""
    return next((entry["text"] for path in paths for entry in read(path) if entry["what"] == "refused"), "")


def pack(fact: Fact) -> str:
    """Return a fact as text; of arrays the digests are enough."""
    values = fact.leaves.items()
    small = {path: replace(leaf, sample=None) if hasattr(leaf.sample, "shape") else leaf for path, leaf in values}
    return b64encode(pickle.dumps(replace(fact, leaves=small))).decode()


def unpack(text: str) -> Fact:
    """Return the fact that `pack` made text, in a process of ours."""
    fact: Fact = pickle.loads(b64decode(text))  # noqa: S301
    return fact
