"""Which operations on files are shown, and what a refused one leaves."""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from heliograph.core.checkpoint.storage.files import SYSTEM, write_whole
from heliograph_testing.chaos.disk import WatchedDisk, replaced

Seen = list[tuple[str, str]]


class Watch:
    """Keeps what it is shown, and refuses a kind."""

    def __init__(self, folder: Path, refused: str = "") -> None:
        self.seen: Seen = []
        self.refused, self.folder = refused, folder
        self._replaced = replaced(WatchedDisk(folder, self.look).doubles)

    def look(self, kind: str, path: str) -> None:
        self.seen.append((kind, str(Path(path).relative_to(self.folder))))
        if kind == self.refused:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def __enter__(self) -> Watch:
        self._replaced.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._replaced.__exit__(None, None, None)


def write_text(folder: Path) -> None:
    (folder / "a").write_text("text")


def write_bytes(folder: Path) -> None:
    with (folder / "a").open("wb", buffering=0) as file:
        file.write(b"text")


def append(folder: Path) -> None:
    with (folder / "a").open("a", buffering=1) as file:
        file.write("text\n")


def write_by_number(folder: Path) -> None:
    file = os.open(folder / "a", os.O_WRONLY | os.O_CREAT)
    os.write(file, b"text")
    os.fsync(file)
    os.close(file)


def write_raw(folder: Path) -> None:
    with closing(io.FileIO(folder / "a", "w")) as file:
        file.write(b"text")


def save_array(folder: Path) -> None:
    with (folder / "a").open("wb") as file:
        np.save(file, np.arange(3))


def save_tensors(folder: Path) -> None:
    with (folder / "a").open("wb") as file:
        torch.save({"a": torch.ones(3)}, file)


@pytest.mark.parametrize(
    "write", [write_text, write_bytes, append, write_by_number, write_raw, save_array, save_tensors]
)
def test_writes_are_shown_and_refused(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with Watch(tmp_path) as watch:
        write(tmp_path)
    assert watch.seen[0] == ("create", "a")
    assert ("write", "a") in watch.seen
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "a").unlink()
    with Watch(tmp_path, "write"), pytest.raises((OSError, RuntimeError)):  # torch raises its own error
        write(tmp_path)
    assert (tmp_path / "a").read_bytes() != content  # a buffer has tried it more than once
    write(tmp_path)
    assert (tmp_path / "a").stat().st_size >= len(content)


def test_moves_and_removals_are_shown(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with Watch(tmp_path) as watch:
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "b").replace(tmp_path / "c")
        (tmp_path / "c").unlink()
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "e").touch()
        shutil.rmtree(tmp_path / "d")
    kinds = [("rename", "b"), ("rename", "c"), ("remove", "c"), ("create", "d"), ("create", "d/e"), ("remove", "d/e")]
    assert watch.seen[: len(kinds)] == kinds


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_file_that_was_open_before_is_shown_where_the_system_writes(tmp_path: Path) -> None:
    file = os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
    with Watch(tmp_path) as watch:
        os.write(file, b"text")
    os.close(file)
    assert watch.seen == [("write", "a")]


def test_what_is_elsewhere_or_only_read_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("text")
    with Watch(tmp_path / "in") as watch:
        write_text(tmp_path)
        assert (tmp_path / "in" / "a").read_text() == "text"
        with tempfile.TemporaryFile() as file:
            file.write(b"text")
    assert watch.seen == []


def test_everything_is_put_back(tmp_path: Path) -> None:
    before = (os.write, os.open, io.open, io.FileIO, SYSTEM.create.__globals__["FileIO"])
    with Watch(tmp_path):
        assert SYSTEM.create.__globals__["FileIO"] is not before[-1]
    assert (os.write, os.open, io.open, io.FileIO, SYSTEM.create.__globals__["FileIO"]) == before


def test_a_refused_operation_leaves_a_whole_file_as_it_was(tmp_path: Path) -> None:
    def write_new(new: Path) -> None:
        new.write_text("new")

    path = tmp_path / "a"
    path.write_text("former")
    for kind in ("create", "write", "sync", "rename"):
        with Watch(tmp_path, kind), pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            write_whole(path, write_new)
        assert path.read_text() == "former"
