"""Which recordings are watched."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from heliograph.packages.recorder.tests.recordings import attempt, write
from heliograph_recorder.format.records import Counters, EventEntry
from heliograph_recorder.watch import run_list
from heliograph_recorder.watch.run_list import RunList


def make(path: Path, modified: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, attempt())
    os.utime(path, (modified, modified))
    return path


def test_the_newest_of_each_folder_is_shown_at_first(tmp_path: Path) -> None:
    for name, modified in (("x/old", 1), ("x/new", 3), ("y/one", 2)):
        make(tmp_path / f"{name}.recording", modified)
    runs = RunList([tmp_path / "x", tmp_path / "y"])
    assert [run.name for run in runs.runs()] == ["x/new", "x/old", "y/one"]
    assert runs.first() == [0, 2]
    assert RunList([tmp_path]).first() == [0]
    assert [run.name for run in RunList([tmp_path]).runs()] == ["x/new", "x/old", "y/one"]


def test_a_run_that_is_not_running_is_listed_with_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end: dict[str, Any] = {
        "status": "failed", "reason": "", "by": None, "rank": None, "metrics": {}, "best": None, "last": None,
        "notes": [], "warnings": ["long"] * 1000,
    }  # fmt: skip
    path = write(tmp_path / "x.recording", attempt(EventEntry("run_closed", 1.0, Counters(), end)))
    runs = RunList([tmp_path])
    assert [row["status"] for row in runs.rows()] == ["failed"]
    whole = path.read_bytes()
    for content in (whole[:-20], whole[: whole.index(b"\n") + 1], b"", whole + whole[:30]):
        path.write_bytes(content)
        assert [row["status"] for row in runs.rows()] == ["killed"]
    monkeypatch.setattr(run_list, "END", 1000)  # less than its last line has
    path.write_bytes(whole)
    assert [row["status"] for row in runs.rows()] == [""]
    (tmp_path / "x.recording.holder").write_text(f"{os.getpid()} {socket.gethostname()}")
    assert [row["status"] for row in runs.rows()] == [""]


@pytest.mark.parametrize(
    "content", [b"hello\n", b"hello", bytes(range(256)) * 1000, b"x" * 2**18, b'["recording",99]\tabc\n']
)
def test_what_is_no_recording_is_not_listed_as_killed(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.recording").write_bytes(content)
    runs = RunList([tmp_path])
    assert [row["status"] for row in runs.rows()] == ["not a readable recording"]


def test_a_file_can_be_named(tmp_path: Path) -> None:
    path = make(tmp_path / "x/one.recording", 1)
    runs = RunList([path, tmp_path])
    assert [(run.path, run.name) for run in runs.runs()] == [(path, "one")]
    assert runs.first() == [0]


def test_a_folder_may_get_its_recordings_later(tmp_path: Path) -> None:
    runs = RunList([tmp_path])
    assert (runs.runs(), runs.first(), runs.rows()) == ([], [], [])
    make(tmp_path / "late.recording", 1)
    assert runs.runs() == []  # not yet looked for
    runs._next_scan = 0.0
    assert [row["name"] for row in runs.rows()] == ["late"]
    assert runs.first() == [0]
    (tmp_path / "late.recording").unlink()
    assert (runs.rows(), runs.first()) == ([], [0])  # whose facts say that it is not there
    assert "late.recording" in runs.runs()[0].facts()["error"]
    assert len(runs.runs()) == 1  # the numbers stay


def test_a_folder_may_be_made_later(tmp_path: Path) -> None:
    runs = RunList([tmp_path / "x"])
    assert (runs.rows(), runs.first(), runs.missing()) == ([], [], [str(tmp_path / "x")])
    make(tmp_path / "x/late.recording", 1)
    runs._next_scan = 0.0
    assert ([row["name"] for row in runs.rows()], runs.first(), runs.missing()) == (["late"], [0], [])


def test_a_file_that_is_no_recording_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"notes\.txt .*\.recording"):
        RunList([tmp_path / "notes.txt"])


def fork_of(path: Path, parent: Path, step: int) -> Path:
    make(path, 5)
    write(path, attempt(hyper_parameters={"forked_from": f"{parent} at step {step}"}))
    return path


def test_a_fork_names_its_parent_which_is_listed_too(tmp_path: Path) -> None:
    parent = make(tmp_path / "x/one.recording", 1)
    fork_of(tmp_path / "y/two.recording", parent, 7)
    fork_of(tmp_path / "z/three.recording", tmp_path / "y/two.recording", 9)
    runs = RunList([tmp_path / "z"])
    assert [row["name"] for row in runs.rows()] == ["three", "y/two", "x/one"]
    assert [row["parent"] for row in runs.rows()] == [
        {"id": 1, "name": "y/two", "step": 9},
        {"id": 2, "name": "x/one", "step": 7},
        None,
    ]
    assert runs.first() == [0]


def test_a_parent_that_was_moved_is_known_by_its_name(tmp_path: Path) -> None:
    fork_of(tmp_path / "y/two.recording", tmp_path / "old/one.recording", 7)
    runs = RunList([tmp_path])
    assert [row["parent"] for row in runs.rows()] == [{"id": None, "name": "one", "step": 7}]
    make(tmp_path / "x/one.recording", 1)
    runs._next_scan = 0.0
    assert [row["parent"] for row in runs.rows()] == [{"id": 1, "name": "x/one", "step": 7}, None]


def test_what_a_recording_names_is_no_way_to_other_files(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("x")
    fork_of(tmp_path / "y/two.recording", tmp_path / "secret.txt", 7)
    assert [row["name"] for row in RunList([tmp_path / "y"]).rows()] == ["two"]
