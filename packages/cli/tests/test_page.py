"""The page on configurations: its files are those of the example, and its commands do what it says."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from heliograph.__main__ import main
from heliograph.packages.tests.examples.running import EXAMPLES
from heliograph.packages.tests.facts import assert_facts
from heliograph.plugins.discovery import VARIABLE

PAGE = (EXAMPLES.parent / "howto/configure_in_a_file.md").read_text(encoding="utf-8")
EXAMPLE = EXAMPLES / "configuration"


def fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with the files of the example."""
    for path in EXAMPLE.glob("*.*"):
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    return tmp_path


def test_the_page_shows_the_files_of_the_example() -> None:
    module = (EXAMPLE / "digits.py").read_text(encoding="utf-8")
    for block in fences("python"):
        assert block.partition("\n")[2] in module
    shown = {block.partition("\n")[0].removeprefix("# "): block for block in fences("yaml")}
    assert shown == {path.name: path.read_text(encoding="utf-8") for path in EXAMPLE.glob("*.yaml")}


def status_of(words: list[str]) -> object:
    try:
        return main(words)
    except SystemExit as ended:  # a help, or what is printed
        return ended.code


@pytest.mark.whole
def test_every_command_of_the_page_runs(example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = list[str]()
    for line in "".join(fences("bash")).replace("\\\n", "").splitlines():
        words = shlex.split(line)
        if words[:3] == ["python", "-m", "heliograph"]:
            assert status_of(words[3:]) == 0
            said.append(capfd.readouterr().out)
    first, longer, wide, short, own, validated, printed, last, overview, plugin = said
    assert "completed: 3 epochs done" in first
    assert "epoch 3, batch 0," in longer
    assert "epochs 3 -> 4" in longer
    assert "starts fresh: no checkpoint" in wide
    assert "starts fresh: no checkpoint" in short
    assert "resumable: nothing is untracked" in own
    assert "weights of runs/own/run_epoch_" in validated
    assert "class_path: heliograph.EarlyStopping" not in printed
    assert "epochs: 3" in printed
    assert "resumed at epoch 4" in last
    assert "--trainer.plugins" in overview
    assert_facts(plugin, "consecutive checks")
    files = {path.name for path in (example / "runs/digits").glob("*.yaml")}
    assert files == {"run.config.yaml", "wide.config.yaml", "short.config.yaml"}


def test_mistakes_are_said_as_the_page_shows_them(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"^\$ python -m heliograph (.*)\n(.*)$", "".join(fences("text")), re.MULTILINE)
    assert len(shown) == 2
    for command, expected in shown:
        assert main(shlex.split(command)) == 2
        assert capsys.readouterr().err.startswith(expected.removesuffix(" ..."))
