"""Reading files that may be somebody else's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from heliograph.core.checkpoint.storage.safe_open import open_regular, read_small


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_pipe, make_folder, make_loop, make_device])
@pytest.mark.parametrize("follow", [True, False])
def test_only_regular_files_are_read(tmp_path: Path, make: object, follow: bool) -> None:
    assert callable(make)
    make(tmp_path / "a")
    with pytest.raises(ValueError, match="a is no regular file: a folder, a link, a pipe or a device"):
        read_small(tmp_path / "a", 100, follow=follow)


def test_a_link_to_a_file_is_followed_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b").symlink_to(tmp_path / "a")

    assert read_small(tmp_path / "b", 7) == b"content"
    with open_regular(tmp_path / "b") as file:
        assert file.read() == b"content"
    with pytest.raises(ValueError, match="no regular file"):
        read_small(tmp_path / "b", 7, follow=False)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    with pytest.raises(ValueError, match="it has 7 bytes, at most 6 are expected"):
        read_small(tmp_path / "a", 6)


def test_the_system_may_give_less_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"content")
    read = os.read
    monkeypatch.setattr(os, "read", lambda handle, size: read(handle, min(size, 3)))

    assert read_small(tmp_path / "a", 7) == b"content"


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "a", 6)
