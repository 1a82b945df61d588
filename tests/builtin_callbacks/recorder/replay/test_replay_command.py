from __future__ import annotations

import argparse
from pathlib import Path

import heliograph as h
import pytest
from heliograph.builtin_callbacks.recorder.replay import command
from heliograph.tests.recordings import fit


def called(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    options = parser.parse_args(["replay", *arguments])
    return int(options.run(options))


def test_the_report_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit([h.LogSchedule(h.Every(steps=4)), h.Recorder(tmp_path)], validation=None)
    assert called(str(tmp_path), "--plugin", "log_schedule:when=Every(steps=6)", "--plugin", "nan_guard") == 0
    shown = capsys.readouterr().out
    assert "with log_schedule, nan_guard\n" in shown
    assert "log_schedule would have asked for log 2 times\n" in shown
    assert "step 6 on batch_end: log - every 6 steps (the run did not)" in shown
    assert "nan_guard would have asked for nothing\n  then it was told: A recording does not hold the losses" in shown


@pytest.mark.parametrize(
    ("plugin", "told"),
    [
        ("log_schedul", "No installed plugin is named 'log_schedul'. Did you mean 'log_schedule'?"),
        ("log_schedule:when=3", "takes a filter such as Every(steps=100), got 3.; while making 'log_schedule:when=3'"),
        ("log_schedule:when=Every(steps=1", "takes a filter such as Every(steps=100)"),
    ],
)
def test_a_wrong_plugin_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], plugin: str, told: str) -> None:
    fit([h.Recorder(tmp_path)], validation=None, epochs=1)
    assert called(str(tmp_path), "--plugin", plugin) == 2
    error = capsys.readouterr().err
    assert error.startswith("heliograph replay: ")
    assert told in error


def test_a_missing_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(str(tmp_path / "none.recording"), "--plugin", "nan_guard") == 2
    assert "There is no recording" in capsys.readouterr().err


def test_two_of_a_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit([h.Recorder(tmp_path)], validation=None, epochs=1)
    assert called(str(tmp_path), "--plugin", "nan_guard", "--plugin", "nan_guard") == 2
    assert "nan_guard" in capsys.readouterr().err


def test_two_settings_of_one_plugin_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit([h.LogSchedule(h.Every(steps=4)), h.Recorder(tmp_path)], validation=None)
    settings = [f"log_schedule:when=Every(steps={steps})" for steps in (8, 6)]
    assert called(str(tmp_path), "--plugin", settings[0], "--plugin", settings[1]) == 0
    shown = capsys.readouterr().out
    assert "\nlog_schedule would have asked for log 2 times\n" in shown
    assert "\nlog_schedule_2 would have asked for log 2 times\n" in shown
    assert shown.endswith("\nlog_schedule_2 is 'log_schedule:when=Every(steps=6)'\n")


def test_a_plugin_that_fails_is_told_by_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit([h.ValidationSchedule(h.Every(epochs=1)), h.Recorder(tmp_path)], epochs=1)
    assert called(str(tmp_path), "--plugin", "early_stopping:monitor=validation/los,mode=min") == 1
    assert "  then it failed: " in capsys.readouterr().out
