from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.recorder.tests.recordings import fit
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder import Recorder
from heliograph_recorder.replays import command
from heliograph_recorder.replays.command import make_plugin, make_plugins, parse_plugin


def call(*arguments: str) -> int:
    return command.replay(arguments)


def test_the_report_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit([h.LogSchedule(h.Every(steps=4)), Recorder(tmp_path)], validation=None)
    assert call(str(tmp_path), "--plugin", "log_schedule:steps=6", "--plugin", "nan_guard") == 0
    shown = capsys.readouterr().out
    assert "with log_schedule, nan_guard\n" in shown
    assert_facts(shown, "log_schedule", "requested log 2")
    assert "step 6 on batch_end:" in shown
    assert_facts(shown, "nan_guard", "nothing\n", "switched off")


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("log_schedul", "Did you mean 'log_schedule'?"),
        (
            "log_schedule:when=3",
            "At(steps=[10, 100])); got 3.",
        ),
        ("log_schedule:when=Every(steps=1)", "as in LogSchedule(steps=100)"),
        ("log_schedule:steps=0", "at least 1; got 0"),
    ],
)
def test_a_wrong_plugin_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plugin: str, message: str
) -> None:
    fit([Recorder(tmp_path)], validation=None, epochs=1)
    assert call(str(tmp_path), "--plugin", plugin) == 2
    error = capsys.readouterr().err
    assert error.startswith("heliograph replay: ")
    assert message in error


def test_a_missing_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(tmp_path / "none.recording"), "--plugin", "nan_guard") == 2
    assert "There is no recording" in capsys.readouterr().err


def test_a_recording_with_a_gap_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit([Recorder(tmp_path)], validation=None, epochs=1)
    [path] = tmp_path.glob("*.recording")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"damaged\n", *lines[4:]]))
    assert call(str(tmp_path), "--plugin", "nan_guard") == 2
    assert_facts(capsys.readouterr().err, "heliograph replay: Attempt 1", "damaged lines")


def test_two_of_a_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit([Recorder(tmp_path)], validation=None, epochs=1)
    assert call(str(tmp_path), "--plugin", "nan_guard", "--plugin", "nan_guard") == 2
    assert "nan_guard" in capsys.readouterr().err


def test_two_settings_of_one_plugin_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit([h.LogSchedule(h.Every(steps=4)), Recorder(tmp_path)], validation=None)
    settings = [f"log_schedule:steps={steps}" for steps in (8, 6)]
    assert call(str(tmp_path), "--plugin", settings[0], "--plugin", settings[1]) == 0
    shown = capsys.readouterr().out
    assert_facts(shown, "\nlog_schedule would", "log 2 times\n")
    assert_facts(shown, "\nlog_schedule_2 would", "log 2 times\n")
    assert shown.endswith("\nlog_schedule_2 is 'log_schedule:steps=6'\n")


def test_a_plugin_that_fails_sets_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit([h.ValidationSchedule(h.Every(epochs=1)), Recorder(tmp_path)], epochs=1)
    assert call(str(tmp_path), "--plugin", "early_stopping:monitor=validation/los,mode=min") == 1
    assert "then it failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("nan_guard", "nan_guard", {}),
        ("early_stopping:patience=2", "early_stopping", {"patience": 2}),
        (
            "early_stopping:monitor=validation/loss,patience=2,mode=min,min_delta=1e-3",
            "early_stopping",
            {"monitor": "validation/loss", "patience": 2, "mode": "min", "min_delta": 1e-3},
        ),
        ("heliograph:early_stopping", "heliograph:early_stopping", {}),
        ("heliograph:early_stopping:patience=2", "heliograph:early_stopping", {"patience": 2}),
        ("gradient_accumulation:n={0: 1, 5: 4}", "gradient_accumulation", {"n": {0: 1, 5: 4}}),
        ("x:a='b=d',e=[1, 2],f=None,g=True,h=-1", "x", {"a": "b=d", "e": [1, 2], "f": None, "g": True, "h": -1}),
        ("file_log:folder=/tmp/a b:c", "file_log", {"folder": "/tmp/a b:c"}),
        ("x:a=", "x", {"a": ""}),
        ("x:a=__import__", "x", {"a": "__import__"}),
        ("x:a=b=c", "x", {"a": "b=c"}),
    ],
)
def test_options_are_literals_or_strings(text: str, name: str, options: dict[str, Any]) -> None:
    assert parse_plugin(text) == (name, options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x=1", r"A plugin is written as name:key=value,key=value, got 'x=1'"),
        ("x:a=1,b", "key=value; got 'b'"),
        ("x:a b=1", "key=value; got 'a b=1'"),
        ("x:a=1,a=2", "once, as key=value; got 'a=2'"),
    ],
)
def test_another_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_plugin(text)


def test_a_plugin_is_made_from_its_entry_point() -> None:
    plugin = make_plugin("early_stopping:monitor=train/loss,patience=7")
    assert isinstance(plugin, h.EarlyStopping)
    assert (plugin.patience, plugin.monitor.name) == (7, "train/loss")


def test_an_option_out_of_its_range_is_an_error_that_names_the_text() -> None:
    with pytest.raises(ValueError, match="patience"):
        make_plugin("early_stopping:patience=0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "early_stopping:patienc=1",
            "'patience'",
        ),
        (
            "log_schedule:at_end=True",
            "LogSchedule(steps=100)",
        ),
        (
            "log_schedule:at_ende=True",
            "'at_end'",
        ),
        ("file_log", "'file_log:folder=...'"),
    ],
)
def test_options_are_those_of_the_plugin(text: str, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        make_plugin(text)
    assert message in str(caught.value)


def test_an_interval_is_written_as_a_counter() -> None:
    assert make_plugin("log_schedule:steps=5,after=20").filter.due_after(0) == 20


def test_settings_of_one_plugin_are_numbered() -> None:
    texts = ["early_stopping:patience=1", "log_schedule:steps=5", "early_stopping:patience=2", "early_stopping"]
    plugins, lines = make_plugins(texts)
    assert [plugin.name for plugin in plugins] == [
        "early_stopping",
        "log_schedule",
        "early_stopping_2",
        "early_stopping_3",
    ]
    assert lines == ["early_stopping_2 is 'early_stopping:patience=2'", "early_stopping_3 is 'early_stopping'"]


def test_a_plugin_that_is_not_installed_is_refused() -> None:
    with pytest.raises(LookupError, match="'early_stopping'"):
        make_plugin("early_stoping:patience=7")
