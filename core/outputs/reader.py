"""Read outputs from files: all of them, or batch by batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.storage.files import SYSTEM
from ..checkpoint.storage.reader import read
from .files import FORMAT, INDEX, NAME, PartFile, batch_numbers
from .parts import interleaved
from .tree import kinds, put_together

LARGEST = 256 * 2**20  # bytes of an index
NAMED = 5  # missing files in an error


class Index:
    """What a folder of predictions holds; making one checks that all of it is there.

    Args:
        folder: of `PredictionWriter`.

    Attributes:
        datasets: the names of the sets, one empty name for a single set.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the predictions are not complete; says what is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise FileNotFoundError(f"There is no folder {self._folder}.")
        index = self._load()
        self.datasets: list[str] = index["sets"]
        self._token, self._ranks = index["token"], index["ranks"]
        self._files = [PartFile(**each) for each in index["files"]]
        self._check_files()

    def read(self, dataset: str) -> Any:
        """Return all outputs of a set, in the order of the data."""
        contents = [self._open(file) for file in self._of(dataset)]
        structure = contents[0]["structure"]
        leaves = []
        for index, kind in enumerate(kinds(structure)):
            rows = [(each["numbers"], each["counts"][index]) for each in contents]
            sources = [_restored(kind[0], each["leaves"][index]) for each in contents]
            leaves.append(interleaved(kind, sources, rows))
        return put_together(structure, leaves)

    def batches(self, dataset: str) -> Iterator[Any]:
        """Yield the outputs of each batch of a set; of each rank, one file is open at a time."""
        files = self._of(dataset)
        place = sorted(
            (number, index, position)
            for index, file in enumerate(files)
            for position, number in enumerate(batch_numbers(file, self._ranks))
        )
        opened: dict[int, Any] = {}
        for _, index, position in place:
            if index not in opened:
                opened[index] = self._open(files[index])
            yield _batch(opened[index], position)
            if position + 1 == files[index].batches:
                del opened[index]

    def _load(self) -> Any:
        path = self._folder / INDEX
        if not path.exists():
            parts = sorted(each.name for each in self._folder.iterdir() if NAME.fullmatch(each.name))
            found = f"there are {len(parts)} files of parts" if parts else "there are no files of PredictionWriter"
            raise ValueError(
                f"The predictions in {self._folder} are not complete: {INDEX} is missing, which is written last, and "
                f"{found}. The run was killed, failed, was cut short, or is still under way."
            )
        try:
            index = json.loads(SYSTEM.read(path, LARGEST))
            if index["format"] != FORMAT:
                raise ValueError(f"its format is {index['format']!r}, and this version reads {FORMAT!r}")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        return index

    def _check_files(self) -> None:
        missing = [file for file in self._files if not (self._folder / file.name).is_file()]
        if missing:
            names = ", ".join(file.name for file in missing[:NAMED]) + ", ..." * (len(missing) > NAMED)
            batches = sum(file.batches for file in missing)
            raise ValueError(
                f"The predictions in {self._folder} are not complete: {len(missing)} of {len(self._files)} files are "
                f"missing, with {batches} batches: {names}. Of several machines, copy the files of all into one folder."
            )

    def _of(self, dataset: str) -> Sequence[PartFile]:
        return [file for file in self._files if file.dataset == dataset]

    def _open(self, file: PartFile) -> Any:
        path = self._folder / file.name
        if SYSTEM.digest(path) != (file.size, file.sha256):
            raise ValueError(f"{path} is not the file that was written: it was changed or damaged. Predict again.")
        content = read(path, map_tensors=True)
        assert content["token"] == self._token
        return content


def read_predictions(folder: str | Path) -> Any:
    """Return what `PredictionWriter` has written, as `result.predictions` would be; named tuples are of a new class.

    Args:
        folder: where they are.

    Returns:
        The outputs of all samples in the order of the data; of several sets, a dict by their names.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: they are not complete, or damaged; says what is missing.
    """
    index = Index(folder)
    whole = {dataset: index.read(dataset) for dataset in index.datasets}
    return whole[""] if index.datasets == [""] else whole


def read_prediction_batches(folder: str | Path) -> Iterator[Any]:
    """Yield what `PredictionWriter` has written, batch by batch in the order of the data.

    Little of it is in memory at a time. Of several sets by name, `(name, outputs)` is yielded.

    Args:
        folder: where they are.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: they are not complete, or damaged; says what is missing.
    """
    index = Index(folder)
    for dataset in index.datasets:
        for outputs in index.batches(dataset):
            yield outputs if index.datasets == [""] else (dataset, outputs)


def _batch(content: Any, position: int) -> Any:
    leaves = []
    for kind, counts, leaf in zip(kinds(content["structure"]), content["counts"], content["leaves"], strict=True):
        start = sum(counts[:position])
        whole = _restored(kind[0], leaf)
        leaves.append(None if whole is None else whole[start : start + counts[position]])
    return put_together(content["structure"], leaves)


def _restored(kind: str, leaf: Any) -> Any:
    return leaf.numpy() if kind == "array" else leaf
