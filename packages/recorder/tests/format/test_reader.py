"""A recording is read even if it is incomplete or damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from heliograph.events import Request
from heliograph.packages.recorder.tests.recordings import PLAIN, attempt, encode, encode_attempt, write
from heliograph.packages.tests.facts import assert_each
from heliograph_recorder.format.lines import encode_head, format_line
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import Batches, Counters, EventEntry, RequestEntry

START = EventEntry("train_start", 0.0, Counters())
ASKED = RequestEntry(0, Request("stop", "me", "enough", 0, 3, 3))


def block(begin: int, end: int) -> Batches:
    """Return regular batches from one to another."""
    steps, zeros = tuple(range(begin + 1, end + 1)), (0,) * (end - begin)
    first = Counters(0, begin, 0, begin, samples=begin, seconds=begin / 100)
    return Batches(first, end / 100, steps, steps, zeros, zeros, steps, zeros, zeros)


def test_of_a_folder_the_newest_recording_is_read(tmp_path: Path) -> None:
    for age, name in ((3, "b"), (1, "a"), (2, "c")):
        path = write(tmp_path / f"{name}.recording", attempt(run=name))
        os.utime(path, ns=(10**18 - age, 10**18 - age))
    (tmp_path / "empty.recording").touch()
    assert read(tmp_path).path.name == "a.recording"
    assert read(str(tmp_path / "b.recording")).attempts[0].run == "b"


def test_a_missing_recording_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no recording"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no recording"):
        read(tmp_path / "x.recording")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("hello\n", "is not a recording"),
        ("[1]\n", "is not a recording"),
        ('["recording",99]\n', "has format 99"),
    ],
    ids=["empty", "text", "json", "newer"],
)
def test_another_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.recording"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_the_last_line_may_be_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path / "x.recording", attempt(START, ASKED))
    path.write_bytes(path.read_bytes()[:-5])
    (only,) = read(path).attempts
    assert only.entries == (START,)
    assert len(only.damage) == 1
    assert only.damage[0].startswith("line 4 (the last")


def test_a_last_line_that_only_lacks_its_newline_is_complete(tmp_path: Path) -> None:
    path = write(tmp_path / "x.recording", attempt(START, ASKED))
    path.write_bytes(path.read_bytes()[:-1])
    assert read(path).attempts[0].entries == (START, ASKED)


def test_damage_within_the_file_is_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.recording", attempt(START, ASKED, block(0, 3)))
    lines = path.read_text().splitlines()
    lines[3:3] = ["\0" * 50, format_line("happened", "log", 0), format_line("unknown")]
    path.write_text("\n".join(lines) + "\n")
    (only,) = read(path).attempts
    assert only.entries == (START, ASKED, block(0, 3))
    assert only.damage == (
        "line 4: damaged",
        only.damage[1],
        only.damage[2],
    )


def test_an_attempt_whose_first_line_is_damaged_stays_separate(tmp_path: Path) -> None:
    path = write(tmp_path / "x.recording", attempt(START), attempt(START, ASKED))
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:40]
    path.write_text("\n".join(lines) + "\n")
    first, second = read(path).attempts
    assert (len(first.entries), len(second.entries), second.name) == (1, 2, "")
    assert second.damage == ("line 4: damaged",)


def test_a_damaged_first_line_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.recording", attempt(START))
    path.write_bytes(b"\0\0" + path.read_bytes()[2:])
    with pytest.raises(ValueError, match="is not a recording"):
        read(path)


def test_the_first_lines_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.recording"
    path.write_text(encode_head() + "\n")
    assert read(path).attempts == ()
    path.write_text(encode_head() + "\n" + encode_attempt(PLAIN)[:30])
    assert read(path).attempts[0].damage[0].startswith("line 2 (the last")
    path.write_text(encode_head() + "\n" + encode(START) + "\n")
    assert_each(read(path).attempts[0].damage, ("the first line", "missing"))
