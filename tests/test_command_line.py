"""The command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from heliograph import CATALOGUE
from heliograph.__main__ import main


def test_events_lists_the_catalogue_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events"]) == 0
    heads = [line.split("(")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert heads == [event.__name__ for event in CATALOGUE]


def test_events_tells_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
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
        "log",
        "save_point",
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


def test_the_demo_trains_tests_and_leaves_its_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "heliograph", "demo", "--folder", str(tmp_path / "digits")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "stopped by early_stopping: validation/loss has not improved on" in done.stdout
    accuracy = float(done.stdout.split("test accuracy ")[1].split("%")[0])
    assert accuracy >= 97.0
    left = {path.suffix for path in (tmp_path / "digits").rglob("*") if path.is_file()}
    assert {".pth", ".jsonl", ".log", ".png"} <= left
    names = [path.name for path in (tmp_path / "digits/checkpoints").iterdir()]
    assert all(name.startswith("digits_epoch_") and "_accuracy_0." in name for name in names)
    assert 2 <= len(names) <= 3
    assert list((tmp_path / "digits/tensorboard").glob("events.out.tfevents.*"))


def test_the_demo_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("heliograph demo: The demo needs sklearn, which cannot be imported (")
    assert said.endswith("): pip install 'heliograph[examples]'\n")
