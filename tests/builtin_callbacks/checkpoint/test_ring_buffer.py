from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import pytest
from heliograph.builtin_callbacks.checkpoint.verify_resume import HEAD, OFFSETS, ROW, ROWS, SIZE, Owner, Ring, Row
from hypothesis import given
from hypothesis import strategies as st

OWNER = Owner(b"t" * 16, b"l" * 16, 1, 2)


def row(number: int, loss: float = 0.5, *, left_out: bool = False) -> Row:
    return Row(number, number % 10, number, 8 * number, loss, 0, -number if left_out else number)


def written(path: Path, *rows: Row) -> Path:
    ring = Ring.new(path, OWNER)
    for each in rows:
        ring.write(each)
    ring.close()
    return path


def rows_of(path: Path) -> list[Row]:
    ring = Ring.open_existing(path)
    assert ring is not None
    assert ring.owner == OWNER
    rows = ring.rows()
    ring.close()
    return rows


def test_what_was_written_is_found(tmp_path: Path) -> None:
    rows = [row(1), row(2, left_out=True), row(3, math.inf)]
    path = written(tmp_path / "a", *reversed(rows))
    assert rows_of(path) == rows
    assert [each.is_skipped for each in rows_of(path)] == [False, True, False]
    assert path.stat().st_size == SIZE < 400_000


def test_the_latest_rows_take_the_place_of_the_oldest(tmp_path: Path) -> None:
    path = written(tmp_path / "a", *map(row, range(1, ROWS + 4)))
    assert [each.number for each in rows_of(path)] == list(range(4, ROWS + 4))


@given(st.integers(0, ROW.size - 1))
def test_a_row_that_a_kill_cut_off_is_not_whole(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """The bytes come in their order; after the cut there is still what was there before."""
    path = written(tmp_path_factory.mktemp("cut") / "a", row(1), row(2), row(3))
    before, after = row(3), row(3 + ROWS, 0.25)
    at = OFFSETS[3]
    content = bytearray(path.read_bytes())
    content[at : at + ROW.size] = after.bits[:cut] + before.bits[cut:]
    path.write_bytes(content)
    assert set(rows_of(path)) <= {row(1), row(2), before, after}


def test_rows_are_compared_by_their_bits() -> None:
    quiet, other = (struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8 << 48, (0x7FF8 << 48) + 1))
    assert row(1, quiet).bits == row(1, quiet).bits != row(1, other).bits
    assert row(1, 0.0).bits != row(1, -0.0).bits


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * SIZE, bytes(SIZE), bytes(SIZE + 1)])
def test_foreign_content_is_not_believed_and_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    assert Ring.open_existing(path) is None
    assert path.read_bytes() == content
    assert rows_of(written(path, row(1))) == [row(1)]


@pytest.mark.parametrize("at", [0, 7])
def test_a_head_of_another_kind_is_not_believed(tmp_path: Path, at: int) -> None:
    path = written(tmp_path / "a", row(1))
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert Ring.open_existing(path) is None


def test_a_row_out_of_its_place_is_not_believed(tmp_path: Path) -> None:
    path = written(tmp_path / "a", row(1))
    content = bytearray(path.read_bytes())
    content[OFFSETS[7] : OFFSETS[7] + ROW.size] = row(8).bits
    path.write_bytes(content)
    assert rows_of(path) == [row(1)]


def test_what_is_no_regular_file_is_not_written_through(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "link").symlink_to(other)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "broken", "fifo"):
        assert Ring.open_existing(tmp_path / name) is None
        assert rows_of(written(tmp_path / name, row(1))) == [row(1)]
    assert other.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "folder").mkdir()
    assert Ring.open_existing(tmp_path / "folder") is None
    with pytest.raises(OSError, match="folder"):
        Ring.new(tmp_path / "folder", OWNER)


def test_another_name_of_a_file_is_not_written_through(tmp_path: Path) -> None:
    path = written(tmp_path / "a", row(1))
    other = tmp_path / "other"
    os.link(path, other)
    before = other.read_bytes()
    assert Ring.open_existing(path) is None
    written(path, row(2))
    assert other.read_bytes() == before


def test_the_head_ends_before_the_rows() -> None:
    assert HEAD.size <= OFFSETS[0]
