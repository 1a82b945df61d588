"""Packages whose plugins cannot be imported: listed, and nothing else."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest
from heliograph.__main__ import main
from heliograph.core.publishing import installed_plugins
from heliograph.core.publishing.installed_plugins import State, states_of
from heliograph.plugins.discovery import Discovered, discover

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
WELL = State("available", "Look out of the window.", ("batch_end", "epoch_end"))
HANGING = "import threading\nthreading.Event().wait()\n"


@pytest.fixture
def weather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of an installed package's plugin, empty yet."""
    info = tmp_path / "weather-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weather\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[heliograph.plugins]\nweather = weather_plugin:Weather\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "weather_plugin.py"


def found() -> list[Discovered]:
    return [each for each in discover() if each.package == "weather"]


@pytest.mark.parametrize(
    ("source", "state"),
    [
        (PLUGIN, WELL),
        ("print('hello')" + PLUGIN, WELL),
        (QUIET, State("available", "", ("epoch_end",))),
        ("raise RuntimeError('it rains')", State("broken", "RuntimeError: it rains")),
        ("raise LookupError", State("broken", "LookupError")),
        ("input()", State("broken", "EOFError: EOF when reading a line")),
        ("import sys; sys.exit(0)", State("broken", "it calls sys.exit(0) when it is imported")),
        ("import sys; sys.exit()", State("broken", "it calls sys.exit() when it is imported")),
        ("import os; os._exit(3)", State("broken", "its import ended the process, with exit status 3")),
        ("Weather = 7", State("broken", "Plugin 'weather' of package weather is not a class or factory: 7.")),
    ],
    ids=[
        "well",
        "talkative",
        "says nothing of itself",
        "raises",
        "without a word",
        "asks",
        "exits",
        "exits plainly",
        "ends the process",
        "no plugin",
    ],
)
def test_what_becomes_of_an_import(weather: Path, source: str, state: State) -> None:
    weather.write_text(source)

    assert states_of(found()) == [state]


def test_a_class_that_could_not_be_registered_is_broken(weather: Path) -> None:
    weather.write_text("from heliograph import Plugin\nclass Weather(Plugin): pass")
    (state,) = states_of(found())
    assert state.word == "broken"
    assert "is not a plugin: register an object with methods marked @on" in state.what


def test_our_own_plugins_are_imported_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    importing: list[str] = []
    at_once: list[int] = []

    def load(plugin: Discovered) -> State:
        importing.append(plugin.name)
        Event().wait(0.001)  # another thread may run
        at_once.append(len(importing))
        importing.remove(plugin.name)
        return WELL

    monkeypatch.setattr(installed_plugins, "_imported", load)
    assert set(states_of([each for each in discover() if each.package == "heliograph"])) == {WELL}
    assert set(at_once) == {1}


def test_an_import_that_hangs_is_given_up(weather: Path) -> None:
    weather.write_text(HANGING)

    assert states_of(found(), limit=0.5) == [State("broken", "its import did not end within 0.5 s")]


def test_names_do_not_steer_the_terminal(
    weather: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = weather.parent / "weather-1.2.dist-info" / "entry_points.txt"
    points.write_text("[heliograph.plugins]\nwea\x1b[2J\u202ether = weather_plugin:Weather\n", encoding="utf-8")
    weather.write_text(HANGING)
    monkeypatch.setenv("HELIOGRAPH_PLUGINS", "-all")

    assert main(["plugins"]) == 0
    said = capsys.readouterr().out
    assert "\nweather:wea\\x1b[2J\\u202ether " in said
    assert all(line.isprintable() for line in said.split("\n"))
