"""Outputs on disk: complete, or not to be read."""

from __future__ import annotations

import errno
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import DeviceEngine, read_prediction_batches, read_predictions
from heliograph.builtin_callbacks.prediction_writer import PartWriter, check_free, clear_folder
from heliograph.core.checkpoint.storage.files import Files
from heliograph.tests.kit import damage

ENGINE = DeviceEngine("cpu")


class Full(Files):
    """A disk on which only so many writes fit."""

    def __init__(self, writes: int) -> None:
        self.writes = writes

    def write(self, file: FileIO, content: bytes | memoryview) -> None:
        """Write, or refuse it."""
        self.writes -= 1
        if self.writes < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(file, content)


def batch(number: int) -> dict[str, Any]:
    rows = number % 3
    return {"x": torch.full((rows, 2), float(number)), "y": np.full(rows, number), "z": [(str(number), number)] * rows}


def write(folder: Path, batches: int = 5, *, size: int = 2, files: Files | None = None, finish: bool = True) -> None:
    writer = PartWriter(folder, 0, size, files or Files())
    for dataset in ("", "b"):
        for number in range(batches):
            writer.add(dataset, number, batch(number))
    if finish:
        writer.finish(ENGINE)


def test_what_is_written_is_read_in_order(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, 0, 2)
    for number in range(5):
        writer.add("", number, batch(number))
    writer.finish(ENGINE)
    whole, rows = read_predictions(tmp_path), [number for number in range(5) for _ in range(number % 3)]
    assert whole["x"].tolist() == [[row, row] for row in rows]
    assert (whole["y"].dtype, whole["y"].tolist()) == (np.int64, rows)
    assert whole["z"] == [(str(row), row) for row in rows]
    for number, each in enumerate(read_prediction_batches(tmp_path)):
        assert torch.equal(each["x"], batch(number)["x"])
        assert each["z"] == batch(number)["z"]
    assert number == 4
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["index.json", "part-00000-000000.pt", "part-00000-000001.pt", "part-00000-000002.pt"]
    torch.load(tmp_path / names[1], weights_only=True)


def test_several_sets_are_read_by_name(tmp_path: Path) -> None:
    write(tmp_path, 2)
    whole = read_predictions(tmp_path)
    assert {name: each["y"].tolist() for name, each in whole.items()} == {"": [1], "b": [1]}
    assert [name for name, _ in read_prediction_batches(tmp_path)] == ["", "", "b", "b"]


def test_without_an_index_nothing_is_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        read_predictions(tmp_path / "none")
    with pytest.raises(ValueError, match=r"index.json, .* missing"):
        read_predictions(tmp_path)
    write(tmp_path, finish=False)
    with pytest.raises(ValueError, match=r"index.json, .* is missing"):
        next(read_prediction_batches(tmp_path))


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    damage(tmp_path / "part-00000-000001.pt")
    with pytest.raises(ValueError, match=r"part-00000-000001\.pt was changed"):
        read_predictions(tmp_path)
    for number in (1, 5):
        (tmp_path / f"part-00000-{number:06}.pt").unlink()
    said = r"2 of 6.*3 batches.*000001\.pt.*000005\.pt"
    with pytest.raises(ValueError, match=said):
        read_predictions(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "another"}'])
def test_a_broken_index_says_so(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json cannot be read"):
        read_predictions(tmp_path)


def test_a_full_disk_at_any_write_leaves_nothing_that_reads_as_complete(tmp_path: Path) -> None:
    class Counting(Full):
        pass

    counting = Counting(10**6)
    write(tmp_path / "whole", files=_made(counting, tmp_path / "whole"))
    writes = 10**6 - counting.writes
    for fitting in range(writes):
        folder = tmp_path / str(fitting)
        with pytest.raises(OSError, match="No space left"):
            write(folder, files=_made(Full(fitting), folder))
        with pytest.raises(ValueError, match="not complete"):
            read_predictions(folder)


def _made(files: Full, folder: Path) -> Full:
    folder.mkdir()
    return files


def test_a_folder_with_predictions_is_not_free_until_it_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("stays")
    write(tmp_path)
    with pytest.raises(ValueError, match=r"overwrite=True"):
        check_free(tmp_path)
    clear_folder(tmp_path)
    check_free(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("outputs", "said"),
    [([object()], "the list of outputs"), (np.array(["a"]), "numpy.str_")],
)
def test_what_could_not_be_read_safely_is_refused(tmp_path: Path, outputs: Any, said: str) -> None:
    writer = PartWriter(tmp_path, 0, 1)
    with pytest.raises(TypeError, match=said):
        writer.add("", 0, outputs)
