"""`python -m heliograph plugins`: the lists of plugins, those of other packages and their health, a page for each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path

import heliograph
import pytest
from heliograph.__main__ import main
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.plugins import Discovered, discover
from heliograph_cli.plugins_command import argument_texts

WELL = '''
from heliograph import EpochEnd, Plugin, on

class Weather(Plugin):
    """Look outside."""

    @on(EpochEnd)
    def look(self, run, event):
        pass
'''
MISFIT = "from heliograph import Plugin\nclass Weather(Plugin): pass\n"
NOT_A_PLUGIN = "class Weather:\n    def on_epoch_end(self, trainer): pass\n"
WRONG_HANDLER = """
from heliograph import EpochEnd, Plugin, on

class Weather(Plugin):
    @on(EpochEnd)
    def look(self, run):
        pass
"""
NEEDS_ARGUMENTS = '''
from heliograph import EpochEnd, on

class Weather:
    """Look there."""

    def __new__(cls, where):
        return super().__new__(cls)

    @on(EpochEnd)
    def look(self, run, event):
        pass
'''
Lay = Callable[..., None]


@pytest.fixture
def lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lay:
    """Lay a package into a folder, as an installer would: `lay(source, package="acme", plugin="weather")`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("HELIOGRAPH_PLUGINS", raising=False)

    def write(source: str, package: str = "acme", plugin: str = "weather", metadata: str = "") -> None:
        monkeypatch.delitem(sys.modules, f"{package}_plugin", raising=False)
        info = tmp_path / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n{metadata}")
        (info / "entry_points.txt").write_text(f"[heliograph.plugins]\n{plugin} = {package}_plugin:Weather\n")
        (tmp_path / f"{package}_plugin.py").write_text(source)

    return write


def table(capsys: pytest.CaptureFixture[str], *options: str, status: int = 0) -> list[list[str]]:
    """Return the cells of the table of plugins of others."""
    assert main(["plugins", *options]) == status
    lines = capsys.readouterr().out.splitlines()
    if not (heads := [number for number, line in enumerate(lines) if line.startswith("OTHER PACKAGES")]):
        return []
    rows = lines[heads[0] : lines.index("", heads[0]) if "" in lines[heads[0] :] else None]
    assert rows[0].split("  ")[0] == "OTHER PACKAGES"
    return [
        [cell.strip() for cell in line.split("  ", 1)[:1] + line.split("  ", 1)[1].split(maxsplit=1)]
        for line in rows[1:]
    ]


def test_plugins_has_one_line_each_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=1) == ["NAME", "WHAT IT DOES"]
    assert [line.split()[0] for line in lines[1:]] == [each.name for each in discover()]
    row = next(line for line in lines if line.startswith("gradient_clipping "))
    assert row.split(maxsplit=1)[1].startswith("Clip the gradients")


def test_plugins_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    cut = next(line for line in lines if line.startswith("ema "))
    assert_facts(cut, "Maintain an exponential", "...")


def test_plugins_verbose_lists_package_version_state_class_and_events(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "-v"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(f"checkpoint (package heliograph {heliograph.__version__}, available)")
    assert_each(
        lines[start + 1 : start + 5],
        ("Save the state",),
        ("class: heliograph.builtin_callbacks.checkpoint.plugin:Checkpoint",),
        ("events: batch_end, checkpoint_loaded, epoch_end,", "last_boundary, late_result, log, run_closed,"),
        ("save_point, train_end, train_start, validation_end",),
    )
    assert max(map(len, lines)) <= 100


def test_without_others_there_is_one_table_and_nothing_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    said = capsys.readouterr().out
    assert "OTHER PACKAGES" not in said
    assert "--check" not in said


def test_nothing_of_others_is_imported_unless_that_is_asked_for(
    lay: Lay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lay(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n{WELL}", metadata="Summary: Forecasts.\n")
    assert table(capsys) == [["acme:weather", "1.2", "not imported: Forecasts."]]
    main(["plugins", "-v"])
    said = capsys.readouterr().out
    assert_facts(said, "weather (package acme 1.2,", "not imported)\n", "Forecasts.\n", "class: acme_plugin:Weather\n")
    main(["plugins"])
    assert_facts(capsys.readouterr().out, "`python -m heliograph plugins", "--check`")
    assert not (tmp_path / "imported").exists()
    assert table(capsys, "--check") == [["acme:weather", "1.2", "available: Look outside."]]
    assert (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("source", "health"),
    [
        ("raise RuntimeError('it rains')", "broken: RuntimeError: it rains"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import sys; sys.exit(0)", "broken: SystemExit: 0"),
        ("other = 1", "no attribute 'Weather'"),
        (MISFIT, "is not a plugin"),
        (NOT_A_PLUGIN, "No event calls Weather.on_epoch_end"),
        (WRONG_HANDLER, "Weather.look(run) cannot handle EpochEnd"),
        (NEEDS_ARGUMENTS, "available: Look there."),
        ("def Weather(): pass", "available"),
    ],
    ids=[
        "raises",
        "lacks",
        "exits",
        "misnamed",
        "no handler",
        "foreign",
        "handler",
        "new",
        "function",
    ],
)
def test_a_broken_one_is_named_with_the_reason_and_the_others_are_listed(
    lay: Lay, source: str, health: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lay(source)
    lay(WELL, package="beta", plugin="window")
    is_broken = not health.startswith("available")
    broken, well = table(capsys, "--check", status=int(is_broken))
    assert broken[:2] == ["acme:weather", "1.2"]
    assert health in broken[2]
    assert broken[2].startswith("broken: ") == is_broken
    assert well == ["beta:window", "1.2", "available: Look outside."]


def test_plugins_of_one_name_are_listed_with_their_packages(lay: Lay, capsys: pytest.CaptureFixture[str]) -> None:
    lay(WELL, metadata="Summary: Forecasts.\n")
    lay(WELL, package="beta")
    lay(WELL, package="gamma", plugin="ema")
    assert_each(
        table(capsys),
        ("gamma:ema", "1.2", "not imported"),
        ("acme:weather", "1.2", "not imported: Forecasts."),
        ("beta:weather", "1.2", "not imported"),
    )


def test_one_that_is_switched_off_is_not_imported(
    lay: Lay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay("raise RuntimeError('it rains')")
    monkeypatch.setenv("HELIOGRAPH_PLUGINS", "-weather")
    assert_each(table(capsys, "--check"), ("acme:weather", "1.2", "switched off", "HELIOGRAPH_PLUGINS"))


OPTIONS = '''
from __future__ import annotations
from heliograph import EpochEnd, Plugin, on

class Sky(Plugin):
    """Know the sky.

    Args:
        where: which window.
        unit: of the temperature.
    """
    def __init__(self, where: str, *panes: int, unit: str = "C", **others: int) -> None: ...

class Weather(Sky):
    """Look outside.

    Twice a day.

    It draws nothing.

    Args:
        where: the window, to look
            out of.
        **others: what else.

    Raises:
        ValueError: it rains.
    """

    asks = ("stop", "log")
    needs = property(len)  # an object's own, not known of the class

    @on(EpochEnd)
    def look(self, run, event):
        pass
'''
PAGE = """\
weather (package acme 1.2)

Look outside.

Twice a day.

It draws nothing.

Options:
    where: str (required)
        the window, to look out of.
    *panes: int
    unit: str = 'C'
        of the temperature.
    **others: int
        what else.

Events: epoch_end
Asks for: stop, log
Class: acme_plugin:Weather
In a program: trainer.plugins.load('weather', where=...)
"""
FUNCTION = """
def Weather(where=1.5):
    '''Make one.

    Args:
        where (float): the window.
    '''
"""


@pytest.fixture
def forget() -> Iterator[None]:
    """Forget the modules that a command has imported."""
    yield
    for module in ("acme_plugin", "beta_plugin"):
        sys.modules.pop(module, None)


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize("name", ["weather", "acme:weather", "Weather"])
def test_one_plugin_is_shown_with_its_options(lay: Lay, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lay(OPTIONS)
    assert main(["plugins", name]) == 0
    assert capsys.readouterr().out == PAGE


@pytest.mark.usefixtures("forget")
def test_a_function_that_makes_one_has_options_too(
    lay: Lay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay(FUNCTION)
    monkeypatch.setenv("HELIOGRAPH_PLUGINS", "-weather")
    assert main(["plugins", "weather"]) == 0
    assert_facts(
        capsys.readouterr().out,
        "weather (package acme 1.2,",
        "switched off)\n",
        "Make one.\n",
        "Options:\n",
        "where = 1.5\n",
        "the window.\n",
        "Class: acme_plugin:Weather\n",
        "trainer.plugins.load('weather')\n",
    )


OWN = [each for each in discover() if each.package == "heliograph"]


@pytest.mark.parametrize("plugin", OWN, ids=lambda plugin: plugin.name)
def test_every_option_of_ours_has_a_text(plugin: Discovered) -> None:
    made_by = plugin.load()
    assert argument_texts(made_by).keys() == signature(made_by).parameters.keys()


@pytest.mark.usefixtures("forget")
def test_an_unknown_name_names_the_nearest(lay: Lay, capsys: pytest.CaptureFixture[str]) -> None:
    for given, facts in (
        ("early_stoping", ("'early_stoping'", "Did you mean 'early_stopping'", "Known: ")),
        ("EarlyStoping", ("'EarlyStoping'", "Did you mean 'early_stopping'", "Known: ")),
        ("acme:weather", ("'acme:weather'.",)),
    ):
        assert main(["plugins", given]) == 2
        assert_facts(capsys.readouterr().err, "heliograph plugins: ", *facts)
    lay(WELL)
    lay(WELL, package="beta")
    assert main(["plugins", "Weather"]) == 2
    assert_facts(capsys.readouterr().err, "heliograph plugins: ", "'weather'", "acme:weather, beta:weather")


LACKS_EXTRA = """
from heliograph.core.system.extras import require

require('no_such_module', 'Weather', extra='wandb')
"""


def test_one_that_lacks_an_extra_says_how_to_install_it(lay: Lay, capsys: pytest.CaptureFixture[str]) -> None:
    lay(LACKS_EXTRA)
    assert main(["plugins", "weather"]) == 2
    said = capsys.readouterr().err
    assert_facts(said, "heliograph plugins: ", "'weather'", "acme 1.2", "acme_plugin:Weather")
    assert said.endswith(": pip install 'heliograph[wandb]'\n")


def test_one_plugin_is_neither_checked_nor_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--check", "ema"]) == 2
    assert_facts(capsys.readouterr().err, "heliograph plugins: ", "-v and --check", "ema")


def test_json_lists_plugins_and_the_options_of_one(lay: Lay, capsys: pytest.CaptureFixture[str]) -> None:
    lay(WELL)
    assert main(["plugins", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["schema"] == "heliograph.plugins/1"
    rows = {plugin["name"]: plugin for plugin in facts["plugins"]}
    assert (rows["weather"]["state"], rows["early_stopping"]["state"]) == ("not imported", "available")
    assert rows["early_stopping"]["package"] == "heliograph"
    assert main(["plugins", "EarlyStopping", "--json"]) == 0
    (plugin,) = json.loads(capsys.readouterr().out)["plugins"]
    options = {option["name"]: option for option in plugin["options"]}
    assert (plugin["name"], options["monitor"]["default"]) == ("early_stopping", "'validation/loss'")
    assert (options["patience"]["type"], options["patience"]["default"]) == ("int", "3")


def test_json_has_the_error_of_a_broken_plugin(lay: Lay, capsys: pytest.CaptureFixture[str]) -> None:
    lay("raise OSError('no weather')")
    assert main(["plugins", "--check", "--json"]) == 1
    rows = {plugin["name"]: plugin for plugin in json.loads(capsys.readouterr().out)["plugins"]}
    assert rows["weather"]["state"] == "broken"
    assert_facts(rows["weather"]["text"], "OSError", "no weather")


def test_the_page_of_a_plugin_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["plugins", "early_stopping"]) == 0
    lines = capsys.readouterr().out.split("Options:")[1].splitlines()
    assert 40 < max(map(len, lines)) <= 50
