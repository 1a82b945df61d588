"""The command line."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import heliograph
import pytest
from heliograph.__main__ import main
from heliograph.events import CATALOGUE
from heliograph.packages.recorder.tests.recordings import attempt, write
from heliograph.packages.tests.facts import assert_facts
from heliograph.plugins.discovery import find
from heliograph_recorder.format.records import Counters, EventEntry


def test_events_lists_the_catalogue_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events"]) == 0
    heads = [line.split("(")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert heads == [event.__name__ for event in CATALOGUE]


def test_events_reports_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    main(["events"])
    assert "CheckpointSaved(path: Path, is_best: bool)" in capsys.readouterr().out


def test_a_checkout_that_is_not_installed_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that is imported because Python was started beside it."""
    monkeypatch.setattr("heliograph.plugins.discovery.distributions", list)
    assert main(["plugins"]) == 2
    expected = ("'plugins'", "heliograph-cli", "pip install ./packages/cli\n")
    assert_facts(capsys.readouterr().err, *expected)
    with pytest.raises(LookupError, match=r"not installed.*`pip install"):
        find("ema")


def test_the_version_comes_with_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """Two copies may exist: the line says which one runs."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"heliograph {heliograph.__version__} in {Path(heliograph.__file__).parent}\n"


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "demo" in capsys.readouterr().err


def recording(folder: Path) -> str:
    return str(write(folder / "x.recording", attempt(EventEntry("train_start", 0.0, Counters()))))


def test_a_misspelt_command_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["explian"]) == 2
    assert "Did you mean 'explain'?" in capsys.readouterr().err
    monkeypatch.setattr("heliograph.__main__.discover", lambda group: [])
    assert main(["explian", "runs/x"]) == 2
    err = capsys.readouterr().err
    assert "Did you mean 'explain'?" in err
    assert "pip install ./packages/recorder" in err
    assert main(["chekpoint"]) == 2
    assert "Did you mean 'checkpoint'?" in capsys.readouterr().err


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
    monkeypatch.setattr("heliograph.__main__.event_list", lambda: "caf\u00e9")
    assert main(["events"]) == 0
    assert terminal.buffer.getvalue() == b"caf\\xe9\n"


def test_run_replaces_itself_by_a_program_with_other_plugins(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint(os.environ['HELIOGRAPH_PLUGINS'], sys.argv[1:])\nsys.exit(3)\n"
    )
    command = [sys.executable, "-m", "heliograph", "run", "--disable", "progress", "--enable", "handler_times"]
    environment = {**os.environ, "HELIOGRAPH_PLUGINS": "-tensorboard"}
    done = subprocess.run(
        [*command, str(tmp_path / "train.py"), "--epochs", "3"], env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr, done.returncode) == (
        "-tensorboard,-progress,+handler_times ['--epochs', '3']\n",
        "",
        3,
    )


def test_run_without_its_program(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", str(tmp_path / "train.py")]) == 2
    assert_facts(capsys.readouterr().err, "heliograph run: ", "no such file", str(tmp_path / "train.py"))


def test_run_with_a_plugin_that_is_not_installed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert main(["run", "--enable", "handler_time", str(tmp_path / "train.py")]) == 2
    assert_facts(
        capsys.readouterr().err, "heliograph run: ", "'handler_time'", "Did you mean 'handler_times'", "Known: "
    )


def test_run_with_a_plugin_that_needs_an_option(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert main(["run", "--enable", "recorder", str(tmp_path / "train.py")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "recorder needs folder=..." in line


def test_an_error_within_a_command_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heliograph_recorder.command.explain", lambda arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        main(["explain", "runs"])
    assert "package heliograph-recorder" in caught.value.__notes__[0]


def test_a_command_of_another_package_by_both_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing:explain"]) == 2
    error = capsys.readouterr().err
    assert_facts(error, "heliograph nothing:explain: ", "No installed command", "'nothing:explain'", "Known: ")
    assert "heliograph-recorder:explain" in error


def test_a_command_that_returns_nothing_has_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "quiet"

        def load(self) -> Callable[[Sequence[str]], None]:
            return lambda arguments: None

    monkeypatch.setattr("heliograph.__main__.discover", lambda group: [Point()])
    monkeypatch.setattr("heliograph.__main__.find", lambda name, group: Point())
    assert main(["quiet"]) == 0
