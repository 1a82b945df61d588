"""Who reads a recording while it is written sees it as it was at one moment, whatever the run does meanwhile."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import heliograph as h
import pytest
from heliograph.packages.recorder.tests.recordings import fit
from heliograph_recorder.format import reader, tail, writer
from heliograph_recorder.format.reader import Follower
from heliograph_recorder.format.records import AttemptRecord, Batches, EventEntry
from heliograph_recorder.format.tail import BEGIN, NUMBER, ROW, SIZE
from heliograph_recorder.plugin import Recorder

CUTS = (NUMBER + 2, BEGIN + 2, BEGIN + ROW.size // 2, BEGIN + 2 * ROW.size)


class Moment(NamedTuple):
    """What the files hold."""

    tail: bytes
    file: bytes


class Written:
    """The moments of two files that a run writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.moments: list[Moment] = []

    def see(self, content: bytes | bytearray | None = None) -> None:
        (file,) = self.path.glob("*.recording")
        self.moments.append(Moment(self.moments[-1].tail if content is None else bytes(content), file.read_bytes()))


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> list[Moment]:
    """Return what the files of a run hold after each half of a write."""
    folder = tmp_path_factory.mktemp("written")
    written = Written(folder)

    class Mapped(bytearray):
        """The mapped tail."""

        def __init__(self, file: int, size: int) -> None:
            super().__init__(SIZE)
            written.moments.append(Moment(bytes(self), b""))
            written.see()

        def __setitem__(self, at: Any, value: Any) -> None:
            if isinstance(at, slice):
                half = at.start + len(value) // 2
                super().__setitem__(slice(at.start, half), value[: len(value) // 2])
                written.see(self)
            super().__setitem__(at, value)
            written.see(self)

        def close(self) -> None: ...

    class Seen:
        """A struct; what it writes to the mapped tail is seen."""

        def __init__(self, original: struct.Struct) -> None:
            self.size, self.unpack_from, self._pack = original.size, original.unpack_from, original.pack_into

        def pack_into(self, buffer: Any, *values: Any) -> None:
            self._pack(buffer, *values)
            if isinstance(buffer, Mapped):
                written.see(buffer)

    def write(file: int, data: bytes) -> int:
        done = original(file, data)
        if written.moments:
            written.see()
        return done

    original = os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmap, "mmap", Mapped)
        for name in ("HEAD", "ROW", "INTEGER"):
            patch.setattr(tail, name, Seen(getattr(tail, name)))
        patch.setattr(writer.os, "write", write)  # type: ignore[attr-defined]
        fit([Recorder(folder), h.LogSchedule(h.Every(steps=2))], batches=6, epochs=2, validation=None)
    return [each for each in written.moments if each.file.count(b"\n") > 1]


class Reading:
    """A reading of files that a run writes meanwhile.

    Args:
        path: where the recording is made.
        moments: of the files: two at each reading, whose first part is of the first; then that at which the file is
            read, and from when on nothing more happens.
        cut: where the second part of the tail begins.
    """

    def __init__(self, path: Path, moments: Sequence[Moment], cut: int) -> None:
        self.path, self.moments, self.cut = path, list(moments), cut
        self.tails = 0

    def read_tail(self, path: Path) -> bytes:
        """Return the tail as it is while it is read; the run continues."""
        first, second, next_one = (self.moments[2 * self.tails :] + self.moments[-1:] * 3)[:3]
        self.tails += 1
        self.write(next_one)
        return first.tail[: self.cut] + second.tail[self.cut :]

    def write(self, moment: Moment) -> None:
        """Let the file be as it is at a moment."""
        if not self.path.exists() or self.path.stat().st_size != len(moment.file):  # each write makes it longer
            self.path.write_bytes(moment.file)

    def view(self) -> list[tuple[str, int]]:
        """Return what the reader sees: the batches and the events, with the number of batches at each."""
        self.write(self.moments[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "read_tail", self.read_tail)
            (attempt,) = reader.read(self.path).attempts
        return seen_in(attempt)


def seen_in(attempt: AttemptRecord) -> list[tuple[str, int]]:
    """Return the batches and the events of an undamaged attempt, with the number of batches at each."""
    assert not attempt.damage
    seen: list[tuple[str, int]] = []
    for entry in attempt.entries:
        if isinstance(entry, Batches):
            seen += [("batch", batch.counters.batches) for batch in entry]
        elif isinstance(entry, EventEntry):
            seen.append((entry.event, entry.counters.batches))
    return seen


@pytest.fixture(scope="module")
def views(moments: list[Moment], path: Path) -> list[list[tuple[str, int]]]:
    """Return what a reader sees that no run disturbs, at each moment."""
    return [Reading(path, [each] * 3, 0).view() for each in moments]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where a recording is read."""
    return tmp_path_factory.mktemp("read") / "x.recording"


def test_at_each_moment_there_is_what_there_was_before(views: list[list[tuple[str, int]]]) -> None:
    assert all(later[: len(former)] == former for former, later in pairwise(views))
    assert [number for name, number in views[-1] if name == "batch"] == [*range(1, 13)]
    assert [number for name, number in views[-1] if name == "log"] == [*range(2, 13, 2)]


def test_a_reader_sees_what_there_was_at_one_moment(
    moments: list[Moment], views: list[list[tuple[str, int]]], path: Path
) -> None:
    """The run does something within or between the readings of the tail, or before that of the file."""
    last = len(moments) - 1
    for begin, part, later in product(range(last), range(1, 5), (1, 9)):
        end = min(begin + later, last)
        at = [begin] * part + [end] * (5 - part)
        for cut in CUTS if part in (1, 3) else CUTS[:1]:
            seen = Reading(path, [moments[each] for each in at], cut).view()
            assert seen in views[begin : end + 1], (begin, part, later, cut)


def test_a_follower_sees_at_each_moment_what_a_reader_sees(
    moments: list[Moment], views: list[list[tuple[str, int]]], tmp_path: Path
) -> None:
    path = tmp_path / "x.recording"
    follower, updates = Follower(path), 0
    for moment, view in zip(moments, views, strict=True):
        path.write_bytes(moment.file)
        tail.tail_path(path).write_bytes(moment.tail)
        updates += follower.update()
        assert not follower.update()
        (attempt,) = follower.recording().attempts
        assert seen_in(attempt) == view
    assert updates > len(moments) // 2


def test_a_reading_that_was_disturbed_each_time_omits_the_tail(
    moments: list[Moment], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run writes a whole line before each reading of the file."""
    path.write_bytes(moments[0].file)
    tails, lines = [0], moments[-1].file[len(moments[0].file) :].splitlines(keepends=True)

    def read_tail(path: Path) -> bytes:
        tails[0] += 1
        if not tails[0] % 2:
            with path.open("ab") as file:
                file.write(lines[tails[0] // 2 % len(lines)])
        return moments[0].tail

    monkeypatch.setattr(reader, "read_tail", read_tail)
    (attempt,) = reader.read(path).attempts
    assert tails == [2 * reader.READINGS]
    assert not attempt.damage
    assert len(attempt.entries) > 2  # without the tail
