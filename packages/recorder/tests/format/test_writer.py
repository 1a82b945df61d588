"""Lines are appended by one process, and none is lost while the disk is full."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from heliograph.packages.recorder.tests.recordings import PLAIN, encode, encode_attempt
from heliograph_recorder.format import writer as writing
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import Counters, EventEntry
from heliograph_recorder.format.writer import RecordingWriter

Full = Callable[[int | None], None]


def line(number: int) -> str:
    return encode(EventEntry("train_start", number, Counters(), {"number": number}))


def numbers(path: Path) -> list[int]:
    return [each.data["number"] for each in read(path).attempts[0].entries if isinstance(each, EventEntry)]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Full:
    """Return a function that limits the free space of the disk to so many bytes, None for no limit."""
    room: list[int | None] = [None]
    whole = os.write

    def limited(file: int, data: bytes) -> int:
        if room[0] is None:
            return whole(file, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = whole(file, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(writing.os, "write", limited)  # type: ignore[attr-defined]  # the module's own os
    return lambda left: room.__setitem__(0, left)


@pytest.fixture
def writer(tmp_path: Path) -> RecordingWriter:
    """Return a writer, for the test to close."""
    writer = RecordingWriter.create(tmp_path / "created", "my run")
    writer.write([encode_attempt(PLAIN)])
    return writer


def test_every_file_has_a_unique_name_and_the_usual_permissions(tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        writers = [RecordingWriter.create(tmp_path, "a/b") for _ in range(3)]
    finally:
        os.umask(former)
    assert len({each.path for each in writers}) == 3
    assert stat.S_IMODE(writers[0].path.stat().st_mode) == 0o640
    for each in writers:
        each.close()
    assert sorted(tmp_path.iterdir()) == sorted(each.path for each in writers)


def test_a_second_writer_is_refused(writer: RecordingWriter) -> None:
    with pytest.raises(ValueError, match="is written by process"):
        RecordingWriter.reopen(writer.path)
    writer.close()
    RecordingWriter.reopen(writer.path).close()


def test_no_line_is_lost_while_the_disk_is_full(writer: RecordingWriter, full: Full) -> None:
    writer.write([line(0)])
    full(30)
    with pytest.raises(OSError, match="No space"):
        writer.write([line(1)])
    writer.write([line(2)])  # raises once only
    assert numbers(writer.path) == [0]
    full(None)
    writer.write([line(3)])
    assert numbers(writer.path) == [0, 1, 2, 3]
    assert read(writer.path).attempts[0].damage == ("line 4: damaged",)  # the incomplete write
    full(0)
    with pytest.raises(OSError, match="No space"):
        writer.write([line(4)])
    full(None)
    writer.add([line(5)])
    writer.close()
    assert numbers(writer.path) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("written", [0, 30, None], ids=["nothing", "a part", "all"])
def test_a_ctrl_c_within_a_write_doubles_no_line(
    written: int | None, writer: RecordingWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the system has written, and before `os.write` has returned how much."""
    whole = os.write
    writer.write([line(0)])

    def interrupted(file: int, data: bytes) -> int:
        whole(file, data[:written])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "write", interrupted)  # type: ignore[attr-defined]  # the module's own os
        with pytest.raises(KeyboardInterrupt):
            writer.write([line(1), line(2)])
    writer.add([line(3)])
    writer.close()
    assert numbers(writer.path) == [0, 1, 2, 3]


def test_lines_that_cannot_be_written_at_the_end_are_an_error(writer: RecordingWriter, full: Full) -> None:
    full(0)
    with pytest.raises(OSError, match="No space"):
        writer.write([line(0)])
    writer.add([line(1)])
    with pytest.raises(OSError, match="No space"):
        writer.close()
    RecordingWriter.reopen(writer.path).close()  # the lock was released


def test_a_file_that_cannot_be_created_is_removed(tmp_path: Path, full: Full) -> None:
    for room in (0, 5):
        full(room)
        with pytest.raises(OSError, match="No space"):
            RecordingWriter.create(tmp_path, "run")
    assert not list(tmp_path.iterdir())
    full(None)
    RecordingWriter.create(tmp_path, "run").close()


def test_a_line_after_one_that_was_cut_short_is_separate(writer: RecordingWriter) -> None:
    writer.write([line(0), line(1)])
    writer.close()
    writer.path.write_bytes(writer.path.read_bytes()[:-9])
    again = RecordingWriter.reopen(writer.path)
    again.add([line(2)])
    again.close()
    assert numbers(writer.path) == [0, 2]


def test_another_file_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "x.recording"
    path.write_text("precious\n")
    with pytest.raises(ValueError, match="is not a recording"):
        RecordingWriter.reopen(path)
    assert [each.name for each in tmp_path.iterdir()] == ["x.recording"]
    assert path.read_text() == "precious\n"
