"""`python -m heliograph explain` and `timeline`."""

from __future__ import annotations

import errno
import os
import socket
import webbrowser
from pathlib import Path

import pytest
from heliograph.__main__ import main
from heliograph.packages.recorder.tests.explain.factory import Script, killed_and_resumed, recording
from heliograph.packages.recorder.tests.recordings import write
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder.explain.story import story
from heliograph_recorder.format.reader import read
from heliograph_recorder.timeline.page import page


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write(tmp_path / "digits.v2.recording", *killed_and_resumed().attempts)


def test_explain_knows_whether_the_process_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    script.start()
    path = write(tmp_path / "x.recording", *recording(script).attempts)
    lock = path.with_name(path.name + ".holder")
    for holder, state in (
        ("1", "killed, or still running"),  # on another machine
        ("", "killed, or still running"),  # a copy
        (str(2**22 + 1), "killed"),
        (str(os.getpid()), "running"),
    ):
        lock.unlink(missing_ok=True)
        if holder:
            lock.write_text(f"{holder} {'elsewhere' if holder == '1' else socket.gethostname()}\n")
        assert command("explain", path) == 0
        assert capsys.readouterr().out.startswith(f"digits: {state}\n")


def command(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_explain_prints_the_story(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("explain", recorded) == 0
    assert capsys.readouterr().out == story(read(recorded)) + "\n"


def test_explain_takes_a_folder(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("explain", recorded.parent) == 0
    assert_facts(capsys.readouterr().out, "digits: stopped", "early_stopping on rank 2\n")


def test_timeline_writes_next_to_the_recording(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("timeline", recorded) == 0
    written = recorded.with_name("digits.v2.html")
    assert capsys.readouterr().out == f"{written}\n"
    assert written.read_text(encoding="utf-8") == page(read(recorded))


def test_timeline_opens_the_page(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []

    def show(url: str) -> bool:
        shown.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", show)
    assert command("timeline", recorded, "--output", "a page.html", "--open") == 0
    assert shown == [f"{tmp_path.as_uri()}/a%20page.html"]
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert command("timeline", recorded, "--output", "b.html", "--open") == 2
    assert (tmp_path / "b.html").exists()
    error = capsys.readouterr().err
    assert error.startswith("heliograph timeline: ")
    assert "b.html" in error


@pytest.mark.parametrize("name", ["explain", "timeline"])
def test_a_folder_without_a_recording_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(name, tmp_path) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"heliograph {name}: The folder {tmp_path} has no recording")


def test_a_page_that_cannot_be_written_is_an_error(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("timeline", recorded, "--output", recorded / "a.html") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"heliograph timeline: {recorded} ")
    assert "File exists" in error
    assert command("timeline", recorded, "--output", tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"heliograph timeline: {tmp_path} ")
    assert "Is a directory" in error


@pytest.mark.parametrize("name", ["explain", "timeline"])
def test_a_folder_that_this_user_may_not_read_is_named(
    name: str, recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert command(name, recorded.parent) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"heliograph {name}: {recorded.parent} ")
    assert "Permission denied" in error


def test_missing_folders_are_created(recorded: Path, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "of" / "a.html"
    assert command("timeline", recorded, "--output", page) == 0
    assert page.exists()


@pytest.mark.parametrize("name", ["digits.v2.recording", "digits.v2.recording.tail", "link"])
def test_the_recording_is_not_overwritten(recorded: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = recorded.read_bytes()
    (recorded.parent / "link").symlink_to(recorded)
    assert command("timeline", recorded, "--output", recorded.parent / name) == 2
    assert "has the name of a recording" in capsys.readouterr().err
    assert recorded.read_bytes() == before
    assert sorted(each.name for each in recorded.parent.iterdir()) == ["digits.v2.recording", "link"]


def test_no_other_recording_is_overwritten(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("timeline", recorded, "--output", tmp_path / "another.recording") == 2
    assert "another.recording has the name" in capsys.readouterr().err
    assert not (tmp_path / "another.recording").exists()
