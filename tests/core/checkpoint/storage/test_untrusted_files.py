"""Files from any source, some of which claim more bytes than they have."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph.core.checkpoint.storage import reader
from heliograph.core.checkpoint.storage.files import open_regular, read_small
from heliograph.core.checkpoint.storage.manifest import Entry
from heliograph.core.checkpoint.storage.untrusted_files import check_archive, check_content, read_foreign
from heliograph.tests.stores import seal_as


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_pipe, make_folder, make_loop, make_device])
def test_only_regular_files_are_read(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / "a")
    with pytest.raises(ValueError, match="regular file: a folder,"):
        read_small(tmp_path / "a", 100)


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b").symlink_to(tmp_path / "a")

    assert read_small(tmp_path / "b", 7) == b"content"
    with open_regular(tmp_path / "b") as file:
        assert file.read() == b"content"


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    with pytest.raises(ValueError, match="most 6 are expected"):
        read_small(tmp_path / "a", 6)


def test_the_system_may_give_less_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"content")
    read = os.read
    monkeypatch.setattr(os, "read", lambda handle, size: read(handle, min(size, 3)))

    assert read_small(tmp_path / "a", 7) == b"content"


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "a", 6)


Make = Callable[..., Any]


class Storage:
    """What a file says of a storage of floats."""

    def __init__(self, values: int) -> None:
        self.values = values


class Rebuilt:
    """What a file says of a tensor."""

    def __init__(self, values: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.arguments: tuple[Any, ...] = (Storage(values), 0, size, stride, False, OrderedDict())

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self.arguments


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return ("storage", torch.FloatStorage, "0", "cpu", value.values) if isinstance(value, Storage) else None


def write(path: Path, content: Any, storage_bytes: bytes = bytes(4), compression: int = zipfile.ZIP_STORED) -> Path:
    """Write an archive as torch does, with any content."""
    pickled = io.BytesIO()
    Pickler(pickled, 2).dump(content)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled.getvalue())
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", storage_bytes)
        archive.writestr("archive/version", "3\n")
    return path


def with_manifest(path: Path) -> Path:
    """Write a manifest that fits a file."""
    if path.read_bytes().startswith(b"PK"):
        seal_as(path, Entry(path, "run", 1, 1000.0, 0, ""))
    return path


@pytest.fixture(params=[True, False], ids=["with a manifest", "without"])
def is_refused(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Return a check that an error says in one sentence what is wrong with a file."""

    def check(path: Path, says: str) -> None:
        with pytest.raises(ValueError, match=re.escape(says)) as caught:
            if request.param:
                reader.read(with_manifest(path), map_tensors=True)
            else:
                read_foreign(path)
        assert "\n" not in str(caught.value)

    return check


def test_a_zip_bomb(tmp_path: Path, is_refused: Make, state: Make) -> None:
    content = state(modules={"m": {"w": Rebuilt(5_000_000, (5_000_000,), (1,))}})
    path = write(tmp_path / "a.pth", content, bytes(20_000_000), zipfile.ZIP_DEFLATED)

    assert path.stat().st_size < 30_000
    is_refused(path, "'archive/data.pkl' is compressed")


def test_parts_that_overlap(tmp_path: Path, is_refused: Make, state: Make) -> None:
    path = write(tmp_path / "a.pth", state(modules={}), bytes(100_000))
    content = bytearray(path.read_bytes())
    end = content.rfind(b"PK\5\6")
    size, begin = struct.unpack_from("<LL", content, end + 12)
    listed = bytes(content[begin : begin + size])
    at = listed.index(b"archive/data/0") - 46
    again = listed[at : at + 46 + len("archive/data/0")].replace(b"data/0", b"data/1")
    struct.pack_into("<HHLL", content, end + 8, 5, 5, size + len(again), begin)
    path.write_bytes(bytes(content[: begin + size]) + again + bytes(content[end:]))

    is_refused(path, "its records claim ")


@pytest.mark.parametrize(
    ("values", "stride", "says"),
    [
        (1, (0, 0), "[1000000, 1000000] claims 4,000,000,000,000 bytes"),
        (10**12, (10**6, 1), "cannot be read: RuntimeError"),
        (1, (10**6, 1), "cannot be read: RuntimeError"),
    ],
)
def test_sizes_beyond_all_memory(
    tmp_path: Path, is_refused: Make, state: Make, values: int, stride: tuple[int, ...], says: str
) -> None:
    modules = {"m": {"w": Rebuilt(values, (10**6, 10**6), stride)}}

    is_refused(write(tmp_path / "a.pth", state(modules=modules)), says)


def test_what_is_no_archive(tmp_path: Path, is_refused: Make) -> None:
    (tmp_path / "a.pth").write_bytes(pickle.dumps({"schema": 3}))
    is_refused(tmp_path / "a.pth", "is damaged, or was")


@pytest.mark.parametrize("part", ["plugins", "schema", "modules", "run_name", "progress"])
def test_lists_that_are_shared_again_and_again(tmp_path: Path, is_refused: Make, state: Make, part: str) -> None:
    shared: list[Any] = []
    for _ in range(60):
        shared = [shared, shared]
    torch.save(state(**{part: shared}), tmp_path / "a.pth")

    is_refused(tmp_path / "a.pth", "again and again")


def test_what_torch_saves_is_accepted(tmp_path: Path) -> None:
    one = torch.zeros(1)
    content = {"a": torch.randn(100), "b": one.expand(1000), "c": torch.eye(3).to_sparse(), "d": [1, "x", None]}
    torch.save(content, tmp_path / "a.pth")
    with open_regular(tmp_path / "a.pth") as file:
        check_archive(file, tmp_path / "a.pth")
    check_content(torch.load(tmp_path / "a.pth", weights_only=True), tmp_path / "a.pth")


@pytest.mark.whole
def test_a_bomb_does_not_fill_the_memory(tmp_path: Path, state: Make) -> None:
    content = state(modules={"m": {"w": Rebuilt(250_000_000, (250_000_000,), (1,))}})
    path = with_manifest(write(tmp_path / "a.pth", content, bytes(10**9), zipfile.ZIP_DEFLATED))
    code = (
        "import re, sys, pathlib; from heliograph.core.checkpoint.storage import reader\n"
        "try: reader.load(pathlib.Path(sys.argv[1]))\n"
        "except ValueError: print(1)\n"  # of this program alone: ru_maxrss counts its parent's, too
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    status, kilobytes = map(int, done.stdout.split())

    assert status == 1
    assert kilobytes < 1_200_000
