"""Outputs in files: parts of so many batches, and an index that is written when all of them are complete."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...events import Engine
from ..checkpoint.state.schema import check_plain
from ..checkpoint.storage.files import SYSTEM, Files
from ..checkpoint.storage.save_steps import write_small, write_state
from .parts import Parts, agreed, joined
from .tree import Structure, kinds

INDEX = "index.json"
FORMAT = "heliograph predictions 1"
NAME = re.compile(r"(part-\d+-\d+\.pt|index\.json)(\.part)?")


@dataclass(frozen=True)
class PartFile:
    """A file of outputs.

    Attributes:
        name: within the folder.
        dataset: the set, empty for a single one.
        first: the number of its first batch, in the order of the data.
        batches: how many there are; the next one has a number that is higher by the number of ranks.
        size: in bytes.
        sha256: of the content.
    """

    name: str
    dataset: str
    first: int
    batches: int
    size: int
    sha256: str


def check_free(folder: Path) -> None:
    """Raise ValueError where a folder holds complete predictions."""
    if (folder / INDEX).exists():
        raise ValueError(
            f"{folder} holds predictions: give PredictionWriter another folder, or overwrite=True, which removes them."
        )


def clear_folder(folder: Path, files: Files = SYSTEM) -> None:
    """Make a folder where it is missing, and remove what a former prediction has left there, the index first."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(path.name for path in folder.iterdir() if NAME.fullmatch(path.name)):
        files.unlink(folder / name)
    files.sync_folder(folder)


class PartWriter:
    """Writes the outputs of one process, so many batches to a file.

    Args:
        folder: where to; it exists.
        token: a random name of the prediction.
        rank: of this process, in the names of files.
        batches: in a file.
        files: the operations on files.

    Attributes:
        written: the files.
    """

    def __init__(self, folder: Path, token: str, rank: int, batches: int, files: Files = SYSTEM) -> None:
        self.written: list[PartFile] = []
        self._folder, self._token, self._rank, self._batches, self._files = folder, token, rank, batches, files
        self._dataset = ""
        self._parts: dict[str, Parts] = {}

    def add(self, dataset: str, number: int, outputs: Any) -> None:
        """Take the outputs of a batch, and write those that are due.

        Args:
            dataset: the set.
            number: of the batch, in the order of the data.
            outputs: what the step returned.

        Raises:
            OSError: they cannot be written.
            TypeError: they are of a type that cannot be joined, or not read safely.
            ValueError: they are not like those of the batches before.
        """
        if dataset != self._dataset:
            self.flush()
        self._dataset = dataset
        parts = self._parts.setdefault(dataset, Parts(_called(dataset)))
        parts.add(number, outputs)
        if len(parts.numbers) == self._batches:
            self.flush()

    def flush(self) -> None:
        """Write what is left; see `add` for what it raises."""
        parts = self._parts.get(self._dataset)
        if parts is None or not parts.numbers:
            return
        assert parts.structure is not None
        name = f"part-{self._rank:05}-{len(self.written):06}.pt"
        numbers, counts = [*parts.numbers], parts.counts()
        leaves = [
            _plain(kind, joined(kind, column))
            for kind, column in zip(kinds(parts.structure), parts.columns, strict=True)
        ]
        parts.clear()
        content = {"token": self._token, "numbers": numbers, "structure": parts.structure}
        size, sha256 = self._write(name, {**content, "counts": counts, "leaves": leaves})
        self.written.append(PartFile(name, self._dataset, numbers[0], len(numbers), size, sha256))

    def finish(self, engine: Engine) -> None:
        """Write what is left, and the index, which makes the predictions complete. A collective.

        Raises:
            OSError: they cannot be written.
            ValueError: ranks have outputs that are not alike.
        """
        self.flush()
        of_ranks: list[tuple[list[PartFile], dict[str, Structure | None]]]
        of_ranks = engine.gather_objects((self.written, {name: each.structure for name, each in self._parts.items()}))
        datasets = list(dict.fromkeys(dataset for _, structures in of_ranks for dataset in structures))
        for dataset in datasets:
            agreed([structures.get(dataset) for _, structures in of_ranks], _called(dataset))
        if engine.is_main:
            self._write_index([written for written, _ in of_ranks], datasets)
        engine.barrier()

    def _write_index(self, of_ranks: Sequence[Sequence[PartFile]], datasets: Sequence[str]) -> None:
        entries = [asdict(each) for written in of_ranks for each in written]
        index = {"format": FORMAT, "token": self._token, "ranks": len(of_ranks), "sets": [*datasets], "files": entries}
        hidden = self._folder / f"{INDEX}.part"
        write_small(self._files, hidden, json.dumps(index, indent=1).encode())
        self._files.rename(hidden, self._folder / INDEX)
        self._files.sync_folder(self._folder)

    def _write(self, name: str, content: dict[str, Any]) -> tuple[int, str]:
        """Write a file under a hidden name, make it durable and rename it; return its size and digest."""
        files, hidden = self._files, self._folder / f"{name}.part"
        try:
            written = write_state(files, hidden, content)
            files.rename(hidden, self._folder / name)
            files.sync_folder(self._folder)
        except OSError as error:
            error.add_note(f"heliograph: the predictions in {self._folder} are not complete")
            raise
        return written


def _called(dataset: str) -> str:
    return f"the set {dataset!r}" if dataset else "the loader"


def _plain(kind: Structure, leaf: Any) -> Any:
    """Return a leaf as `torch.load(weights_only=True)` reads it.

    Raises:
        TypeError: it cannot be read so.
    """
    if kind[0] == "array":
        try:
            return torch.from_numpy(leaf)
        except TypeError as error:
            raise TypeError(f"PredictionWriter writes arrays of numbers, not of {leaf.dtype}: give a list.") from error
    if kind[0] == "list":
        try:
            check_plain(leaf, "the list")
        except TypeError as error:
            raise TypeError(
                f"PredictionWriter writes lists of tensors, numbers, strings and dicts, lists or tuples of these, so "
                f"that they are read safely: {error}"
            ) from error
    return leaf


def batch_numbers(file: PartFile, ranks: int) -> Iterator[int]:
    """Yield the numbers of the batches in a file."""
    yield from range(file.first, file.first + file.batches * ranks, ranks)
