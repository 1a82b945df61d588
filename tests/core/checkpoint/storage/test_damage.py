"""Damaged data: any flipped bit and any truncation is found."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import Store, reader

Make = Callable[..., Any]


@pytest.fixture
def good_and_newer(opened: Make, state: Make) -> tuple[Store, Path, bytes]:
    """Return a store with a good checkpoint and a newer one, the newer one's path and its content."""
    store: Store = opened()
    store.save("good.pth", state(1))
    path = store.save("newer.pth", state(2)).path
    return store, path, path.read_bytes()


def regions(path: Path, size: int) -> dict[str, tuple[int, int]]:
    """Return where each record's header and content, and the directory, begin and end."""
    with ZipFile(path) as archive:
        members = sorted(archive.infolist(), key=lambda each: each.header_offset)
        directory = archive.start_dir
    ends = [each.header_offset for each in members[1:]] + [directory]
    found = {"directory": (directory, size)}
    for member, end in zip(members, ends, strict=True):
        header = path.read_bytes()[member.header_offset : end]
        begin = (
            member.header_offset
            + 30
            + int.from_bytes(header[26:28], "little")
            + int.from_bytes(header[28:30], "little")
        )
        found[f"header of {member.filename}"] = (member.header_offset, begin)
        found[f"content of {member.filename}"] = (begin, begin + member.file_size)
        found[f"after {member.filename}"] = (begin + member.file_size, end)
    return found


def test_a_flipped_bit_in_every_byte_of_the_data_is_noticed(good_and_newer: tuple[Store, Path, bytes]) -> None:
    _, path, content = good_and_newer
    draw = random.Random(0)
    with path.open("r+b", buffering=0) as file:
        for index, byte in enumerate(content):
            file.seek(index)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))
            with pytest.raises(ValueError, match="damaged"):
                reader.load(path)
            file.seek(index)
            file.write(bytes([byte]))
    reader.verify(path)


def test_a_flipped_bit_in_a_large_record_is_noticed(opened: Make, state: Make) -> None:
    """Its content is verified by the CRC-32 in the archive's directory, not by the digest in the manifest."""
    weights = {"m": {"one": torch.arange(9000.0), "other": torch.arange(9000.0)}}
    path = opened().save("a.pth", state(modules=weights)).path
    content, draw = path.read_bytes(), random.Random(0)
    ends = {end + step for region in regions(path, len(content)).values() for end in region for step in (-1, 0, 1)}
    with path.open("r+b", buffering=0) as file:
        for index in sorted(ends & {*range(len(content))} | {*range(0, len(content), 61)}):
            file.seek(index)
            file.write(bytes([content[index] ^ 1 << draw.randrange(8)]))
            with pytest.raises(ValueError, match="damaged"):
                reader.verify(path)
            file.seek(index)
            file.write(content[index : index + 1])
    reader.verify(path)


def test_newest_passes_over_a_flip_in_every_region(good_and_newer: tuple[Store, Path, bytes]) -> None:
    store, path, content = good_and_newer
    places = regions(path, len(content))
    assert {"directory", "content of newer/data/0", "header of newer/data.pkl"} <= {
        name.replace("archive/", "newer/") for name in places
    }
    for name, (begin, end) in places.items():
        for index in {begin, (begin + end) // 2, end - 1} if begin < end else set():
            changed = bytearray(content)
            changed[index] ^= 16
            path.write_bytes(changed)
            entry, loaded, passed_over = store.newest()
            assert entry is not None, name
            assert loaded is not None, name
            assert (entry.path.name, float(loaded["modules"]["model"]["weight"][0])) == ("good.pth", 1.0), name
            assert len(passed_over) == 1, name


def test_torch_alone_would_have_accepted_some(good_and_newer: tuple[Store, Path, bytes]) -> None:
    """Why there is a digest: if this ever fails, torch has begun to check its own."""
    _, path, content = good_and_newer
    [weights] = [
        place for name, place in regions(path, len(content)).items() if re.fullmatch("content of .*/data/0", name)
    ]
    changed = bytearray(content)
    changed[weights[0]] ^= 16
    path.write_bytes(changed)

    assert float(reader.read(path)["modules"]["model"]["weight"][0]) != 2.0


def test_a_truncation_at_every_block_is_noticed(good_and_newer: tuple[Store, Path, bytes]) -> None:
    store, path, content = good_and_newer
    sizes = {*range(0, len(content), 64), len(content) - 1}
    for size in sorted(sizes, reverse=True):
        with path.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(ValueError, match=r"is damaged|is empty"):
            reader.load(path)
    entry = store.newest()[0]

    assert entry is not None
    assert entry.path.name == "good.pth"


def test_blocks_that_were_lost_and_read_as_zeros_are_noticed(opened: Make, state: Make) -> None:
    path = opened().save("a.pth", state(weights=torch.rand(5_000))).path
    content = path.read_bytes()
    for begin in range(0, len(content), 4096):
        path.write_bytes(content[:begin] + bytes(len(content[begin : begin + 4096])) + content[begin + 4096 :])
        with pytest.raises(ValueError, match="damaged"):
            reader.load(path)


def test_a_manifest_cut_at_every_byte_is_passed_over(good_and_newer: tuple[Store, Path, bytes]) -> None:
    store, path, _ = good_and_newer
    begin = storage.read_manifest(path).size
    for size in range(path.stat().st_size - 1, begin - 23, -1):
        with path.open("r+b") as file:
            file.truncate(size)
        found, passed_over = store.entries()
        assert [each.path.name for each in found] == ["good.pth"]
        assert len(passed_over) == 1
        assert str(path) in passed_over[0]


def test_data_and_manifest_of_different_saves(good_and_newer: tuple[Store, Path, bytes]) -> None:
    store, path, _ = good_and_newer
    good = path.with_name("good.pth").read_bytes()
    path.write_bytes(path.read_bytes()[: storage.read_manifest(path).size] + good[storage.read_manifest(path).size :])
    with pytest.raises(ValueError, match="damaged"):
        reader.load(path)
    assert store.newest()[0] == storage.read_manifest(path.with_name("good.pth"))
