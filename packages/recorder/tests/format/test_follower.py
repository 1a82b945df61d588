"""A recording that is followed: what was added is parsed once, a line that is not complete waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph.packages.recorder.tests.recordings import attempt, lines
from heliograph_recorder.format.reader import Follower, read
from heliograph_recorder.format.records import Counters, EventEntry

START = EventEntry("train_start", 0.0, Counters())
LATER = EventEntry("train_end", 1.0, Counters(steps=3), {"asked": []})


def test_each_byte_that_is_added_leads_to_what_a_reader_sees(tmp_path: Path) -> None:
    path = tmp_path / "x.recording"
    whole = "".join(f"{line}\n" for line in lines([attempt(START), attempt(START, LATER, name="a2")])).encode()
    path.touch()
    follower = Follower(path)
    found = []
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        if follower.update():
            found.append([len(each.entries) for each in follower.recording().attempts])
    assert found == [[], [0], [1], [1, 0], [1, 1], [1, 2]]
    assert follower.recording() == read(path)


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.recording"
    path.write_text("".join(f"{line}\n" for line in lines([attempt(START, LATER)])))
    follower = Follower(path)
    assert follower.update()
    path.write_text("".join(f"{line}\n" for line in lines([attempt(START, name="other")])))
    assert follower.update()
    (found,) = follower.recording().attempts
    assert (found.name, found.entries) == ("other", (START,))


def test_what_is_not_a_recording_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.recording"
    path.write_text("no recording\n")
    with pytest.raises(ValueError, match="is not a recording"):
        Follower(path).update()
    with pytest.raises(FileNotFoundError):
        Follower(tmp_path / "none.recording").update()
