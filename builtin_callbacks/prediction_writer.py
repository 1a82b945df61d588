"""Files with the outputs of a prediction: each holds several batches; an index is written when all are complete."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.checkpoint.checks import check_plain
from ..core.checkpoint.storage.archive import write_small, write_state
from ..core.checkpoint.storage.files import SYSTEM, Files
from ..core.checkpoint.storage.reader import read
from ..core.outputs import OutputParts, Structure, agreed, interleaved, joined, kinds, put_together
from ..core.system.errors import NotRecorded
from ..events import Engine, Lane, PredictBatchEnd, PredictEnd, PredictStart, Run, RunFailed, ValidationCut
from ..events.checks import check_flag, check_path, check_whole_number
from ..plugins import Plugin, on

INDEX = "index.json"
FORMAT = "heliograph predictions 1"
NAME = re.compile(r"(part-\d+-\d+\.pt|index\.json)(\.part)?")
LARGEST = 256 * 2**20  # bytes of an index


class PredictionWriter(Plugin):
    """Write the outputs of `predict_step` to files, separately on each rank.

    With `trainer.predict(..., gather=False)`, at most `batches` outputs are in memory at a time.
    `heliograph.read_predictions(folder)` returns all of them in the order of the data; `read_prediction_batches` yields
    them. Files are renamed to their final name when complete, and the index, which readers need, is written last. The
    files are written by `torch.save` and can be loaded with `weights_only=True`.

    Args:
        folder: the folder of the files; created if it does not exist. Files of a killed run are removed.
        batches: the number of batches in a file.
        overwrite: whether to remove complete predictions in the folder; otherwise they are an error.

    Raises:
        ValueError: `batches` is not an integer of at least 1; at the start of a prediction, the folder contains another
            one.
        TypeError: an argument has another type; in a prediction, the outputs have a type that cannot be loaded safely.
        OSError: a file cannot be written, for example because the disk is full.
    """

    affects_training = False
    draws = False
    exclusive = ("predictions",)

    def __init__(self, folder: str | Path, *, batches: int = 16, overwrite: bool = False) -> None:
        check_path("PredictionWriter(folder)", folder, "a folder")
        check_flag("overwrite", overwrite)
        self.folder, self.overwrite = Path(folder), overwrite
        self.batches = check_whole_number("batches", batches, of="batches in a file", at_least=1)
        self._writer: PartWriter | None = None
        self._counts: Counter[str] = Counter()

    @on(PredictStart, lane=Lane.PERSIST)
    def begin(self, run: Run, event: PredictStart) -> None:
        """Check and clear the folder."""
        if run.report.is_replay:
            raise NotRecorded("the outputs of a prediction")
        engine = run.engine
        if not self.overwrite:
            check_free(self.folder)
        engine.barrier()  # every rank has checked before one clears
        if engine.is_local_main:
            clear_folder(self.folder)
        engine.barrier()  # every folder was cleared
        self._writer, self._counts = PartWriter(self.folder, engine.rank, self.batches), Counter()

    @on(PredictBatchEnd, lane=Lane.PERSIST)
    def take(self, run: Run, event: PredictBatchEnd) -> None:
        """Write the outputs of a batch."""
        if self._writer is None:  # enabled during the prediction
            return
        number = self._counts[event.dataset] * run.engine.world_size + run.engine.rank
        self._counts[event.dataset] += 1
        self._writer.add(event.dataset, number, run.outputs)

    @on(PredictEnd, lane=Lane.PERSIST)
    def finish(self, run: Run, event: PredictEnd) -> None:
        """Write the remaining outputs and the index."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        writer.finish(run.engine)
        run.note(f"the predictions are in {self.folder}")

    @on(ValidationCut, RunFailed, lane=Lane.PERSIST)
    def leave(self, run: Run, event: ValidationCut | RunFailed) -> None:
        """Warn that the predictions are incomplete."""
        if self._writer is not None:
            run.warn(f"The predictions in {self.folder} are not complete, so they cannot be read: predict again.")
        self._writer = None

    def close(self) -> None:
        self._writer = None


@dataclass(frozen=True)
class PartFile:
    """A file of outputs.

    Attributes:
        name: within the folder.
        dataset: the set; empty for a single one.
        first: the number of its first batch, in the order of the data.
        batches: the number of its batches; consecutive ones differ by the number of ranks.
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
    if (folder / INDEX).exists():
        raise ValueError(f"{folder} already has predictions: choose another folder, or overwrite=True to remove them.")


def clear_folder(folder: Path, files: Files = SYSTEM) -> None:
    # Creates the folder. The index of previous predictions is removed first.
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(path.name for path in folder.iterdir() if NAME.fullmatch(path.name)):
        files.unlink(folder / name)
    files.sync_folder(folder)


class PartWriter:
    """Writes the outputs of one process, several batches per file.

    Args:
        folder: an existing folder.
        rank: of this process, for file names.
        batches: per file.
        files: the operations on files.

    Attributes:
        written: the files so far.
    """

    def __init__(self, folder: Path, rank: int, batches: int, files: Files = SYSTEM) -> None:
        self.written: list[PartFile] = []
        self._folder, self._rank, self._batches, self._files = folder, rank, batches, files
        self._dataset = ""
        self._parts: dict[str, OutputParts] = {}

    def add(self, dataset: str, number: int, outputs: Any) -> None:
        """Add the outputs of a batch, and write a file if enough batches are buffered.

        Args:
            dataset: the set.
            number: of the batch, in the order of the data.
            outputs: what the step returned.

        Raises:
            OSError: writing failed.
            TypeError: outputs of this type cannot be joined, or not be read safely.
            ValueError: the structure differs from earlier batches.
        """
        if dataset != self._dataset:
            self.flush()
        self._dataset = dataset
        parts = self._parts.setdefault(dataset, OutputParts(_called(dataset)))
        parts.add(number, outputs)
        if len(parts.numbers) == self._batches:
            self.flush()

    def flush(self) -> None:
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
        content = {"numbers": numbers, "structure": parts.structure, "counts": counts, "leaves": leaves}
        size, sha256 = self._write(name, content)
        self.written.append(PartFile(name, self._dataset, numbers[0], len(numbers), size, sha256))

    def finish(self, engine: Engine) -> None:
        """Write the buffered batches, then the index, which completes the predictions. A collective.

        Raises:
            OSError: writing failed.
            ValueError: the ranks have outputs of different structure.
        """
        self.flush()
        of_ranks: list[tuple[list[PartFile], dict[str, Structure | None]]]
        of_ranks = engine.gather_objects((self.written, {name: parts.structure for name, parts in self._parts.items()}))
        datasets = list(dict.fromkeys(dataset for _, structures in of_ranks for dataset in structures))
        for dataset in datasets:
            agreed([structures.get(dataset) for _, structures in of_ranks], _called(dataset))
        if engine.is_main:
            self._write_index([written for written, _ in of_ranks], datasets)
        engine.barrier()

    def _write_index(self, of_ranks: Sequence[Sequence[PartFile]], datasets: Sequence[str]) -> None:
        entries = [asdict(file) for written in of_ranks for file in written]
        index = {"format": FORMAT, "ranks": len(of_ranks), "sets": [*datasets], "files": entries}
        hidden = self._folder / f"{INDEX}.part"
        write_small(self._files, hidden, json.dumps(index, indent=1).encode())
        self._files.rename(hidden, self._folder / INDEX)
        self._files.sync_folder(self._folder)

    def _write(self, name: str, content: dict[str, Any]) -> tuple[int, str]:
        # Writes a temporary file, then renames it.
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
    # The form that `torch.load(weights_only=True)` reads.
    if kind[0] == "array":
        return torch.from_numpy(leaf)
    if kind[0] == "list":
        check_plain(leaf, "the list of outputs")
    return leaf


class Index:
    """The index of a folder of predictions; the constructor checks that all files exist.

    Args:
        folder: of `PredictionWriter`.

    Attributes:
        datasets: the names of the sets; one empty name for a single set.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the predictions are not complete; the message lists the missing files.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise FileNotFoundError(f"There is no folder {self._folder}.")
        index = self._load()
        self.datasets: list[str] = index["sets"]
        self._ranks = index["ranks"]
        self._files = [PartFile(**entry) for entry in index["files"]]
        self._check_files()

    def read(self, dataset: str) -> Any:
        contents = [self._open(file) for file in self._of(dataset)]
        structure = contents[0]["structure"]
        leaves = []
        for index, kind in enumerate(kinds(structure)):
            rows = [(content["numbers"], content["counts"][index]) for content in contents]
            sources = [_restored(kind[0], content["leaves"][index]) for content in contents]
            leaves.append(interleaved(kind, sources, rows))
        return put_together(structure, leaves)

    def batches(self, dataset: str) -> Iterator[Any]:
        # One file per rank is open at a time.
        files = self._of(dataset)
        place = sorted(
            (file.first + position * self._ranks, index, position)
            for index, file in enumerate(files)
            for position in range(file.batches)
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
            raise ValueError(f"The predictions in {self._folder} are not complete: {INDEX}, the last file, is missing.")
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
            names = ", ".join(file.name for file in missing)
            batches = sum(file.batches for file in missing)
            raise ValueError(
                f"The predictions in {self._folder} are not complete: {len(missing)} of {len(self._files)} files are "
                f"missing, with {batches} batches: {names:.100}. Copy the files of all machines into one folder."
            )

    def _of(self, dataset: str) -> Sequence[PartFile]:
        return [file for file in self._files if file.dataset == dataset]

    def _open(self, file: PartFile) -> Any:
        path = self._folder / file.name
        if SYSTEM.digest(path) != (file.size, file.sha256):
            raise ValueError(f"{path} was changed or damaged after it was written. Predict again.")
        return read(path, map_tensors=True)


def read_predictions(folder: str | Path) -> Any:
    """Read the outputs that `PredictionWriter` wrote, in the order of the data.

    The result equals `result.predictions`, except that named tuples are of a new class.

    Args:
        folder: the folder of the predictions.

    Returns:
        The outputs of all samples in the order of the data; for several sets, a dict by set name.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the predictions are incomplete or damaged; the message lists the missing files.
    """
    index = Index(folder)
    outputs = {dataset: index.read(dataset) for dataset in index.datasets}
    return outputs[""] if index.datasets == [""] else outputs


def read_prediction_batches(folder: str | Path) -> Iterator[Any]:
    """Read the outputs that `PredictionWriter` wrote, batch by batch.

    The batches are in the order of the data, and few are in memory at a time. For several named sets, it yields
    `(name, outputs)`.

    Args:
        folder: the folder of the predictions.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the predictions are incomplete or damaged; the message lists the missing files.
    """
    index = Index(folder)
    for dataset in index.datasets:
        for outputs in index.batches(dataset):
            yield outputs if index.datasets == [""] else (dataset, outputs)


def _batch(content: Any, position: int) -> Any:
    leaves = []
    for kind, counts, leaf in zip(kinds(content["structure"]), content["counts"], content["leaves"], strict=True):
        start = sum(counts[:position])
        rows = _restored(kind[0], leaf)
        leaves.append(None if rows is None else rows[start : start + counts[position]])
    return put_together(content["structure"], leaves)


def _restored(kind: str, leaf: Any) -> Any:
    return leaf.numpy() if kind == "array" else leaf
