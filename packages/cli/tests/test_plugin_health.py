"""Packages whose plugins cannot be imported: listed, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from heliograph.__main__ import main
from heliograph.plugins import discover
from heliograph_cli.plugins_command import PluginState, state_of

PLUGIN = '''
from heliograph import BatchEnd, EpochEnd, Plugin, on

class Weather(Plugin):
    """Look out of
    the window.

    Every day.
    """

    @on(EpochEnd, BatchEnd)
    def look(self, run, event):
        pass
'''
QUIET = """
from heliograph import EpochEnd, on

class Weather:
    @on(EpochEnd)
    def look(self, run, event):
        pass
"""
WELL = ("available", "Look out of the window.", ["batch_end", "epoch_end"])


@pytest.fixture
def weather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of an installed package's plugin, empty yet."""
    info = tmp_path / "weather-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weather\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[heliograph.plugins]\nweather = weather_plugin:Weather\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "weather_plugin", None)
    del sys.modules["weather_plugin"]  # and again at the end, as imported here
    return tmp_path / "weather_plugin.py"


def state() -> PluginState:
    """Return the state of that plugin, which is imported."""
    (plugin,) = [plugin for plugin in discover() if plugin.package == "weather"]
    return state_of(plugin)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLUGIN, WELL),
        ("print('hello')" + PLUGIN, WELL),
        (QUIET, ("available", "", ["epoch_end"])),
        ("raise RuntimeError('it rains')", ("broken", "RuntimeError: it rains", [])),
        ("raise LookupError", ("broken", "LookupError", [])),
        ("import sys; sys.exit(0)", ("broken", "SystemExit: 0", [])),
        ("raise SystemExit", ("broken", "SystemExit", [])),
        ("Weather = 7", ("broken", "factory: 7.", [])),
    ],
    ids=[
        "well",
        "talkative",
        "says nothing of itself",
        "raises",
        "without a word",
        "exits",
        "exits plainly",
        "no plugin",
    ],
)
def test_what_becomes_of_an_import(weather: Path, source: str, expected: tuple[str, str, list[str]]) -> None:
    weather.write_text(source)
    actual = state()
    word, text, events = expected
    assert (actual.word, bool(actual.text), [*actual.events]) == (word, bool(text), events)
    assert actual.text.endswith(text)


def test_a_class_that_could_not_be_registered_is_broken(weather: Path) -> None:
    weather.write_text("from heliograph import Plugin\nclass Weather(Plugin): pass")
    assert state().word == "broken"
    assert "plugin: register" in state().text


def test_names_do_not_steer_the_terminal(
    weather: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = weather.parent / "weather-1.2.dist-info" / "entry_points.txt"
    points.write_text("[heliograph.plugins]\nwea\x1b[2J\u202ether = weather_plugin:Weather\n", encoding="utf-8")
    weather.write_text(PLUGIN)
    monkeypatch.setenv("HELIOGRAPH_PLUGINS", "-all")

    assert main(["plugins"]) == 0
    said = capsys.readouterr().out
    assert "\nweather:wea\\x1b[2J\\u202ether " in said
    assert all(line.isprintable() for line in said.split("\n"))
