"""The command line."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from heliograph import CATALOGUE
from heliograph.__main__ import main
from heliograph.builtin_callbacks.recorder.format.records import Counters, EventEntry
from heliograph.tests.recordings import attempt, write


def test_events_lists_the_catalogue_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events"]) == 0
    heads = [line.split("(")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert heads == [event.__name__ for event in CATALOGUE]


def test_events_reports_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    main(["events"])
    assert "CheckpointSaved(path: Path, is_best: bool)" in capsys.readouterr().out


def test_plugins_lists_name_package_version_state_and_events(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["NAME", "PACKAGE", "VERSION", "STATE", "EVENTS"]
    row = next(row for row in rows if row[0] == "checkpoint")
    assert row[1:] == [
        "heliograph",
        "0.1.0",
        "available",
        "checkpoint_loaded",
        "last_boundary",
        "log",
        "run_closed",
        "run_failed",
        "save_point",
        "train_end",
        "train_start",
        "validation_end",
    ]


def test_a_broken_or_switched_off_plugin_is_listed_as_such(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "weather-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weather\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[heliograph.plugins]\nweather = weather_plugin:Weather\n")
    (tmp_path / "weather_plugin.py").write_text("raise RuntimeError('it rains')\n")
    monkeypatch.syspath_prepend(tmp_path)
    main(["plugins"])
    broken = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("weather"))
    assert broken.split(maxsplit=4) == ["weather", "weather", "1.2", "broken", "it rains"]
    monkeypatch.setenv("HELIOGRAPH_DISABLE_PLUGINS", "weather")
    main(["plugins"])
    off = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("weather"))
    assert "switched off" in off


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "demo" in capsys.readouterr().err


def recording(folder: Path) -> str:
    return str(write(folder / "x.recording", attempt(EventEntry("train_start", 0.0, Counters()))))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "given",
    [("events",), ("explain",), ("timeline",), ("replay", "--plugin", "early_stopping")],
    ids=lambda given: given[0],
)
def test_a_reader_that_has_seen_enough_is_no_error(given: tuple[str, ...], tmp_path: Path) -> None:
    """`python -m heliograph events | head` closes the pipe while there is more to write."""
    name, *rest = given
    reading, writing = os.pipe()
    os.close(reading)
    try:
        about = [recording(tmp_path)] * (name != "events")
        command = [sys.executable, "-m", "heliograph", name, *about, *rest]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_what_a_terminal_cannot_show_is_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("heliograph.__main__.plugin_table", lambda: "caf\u00e9")
    assert main(["plugins"]) == 0
    assert terminal.buffer.getvalue() == b"caf\\xe9\n"
