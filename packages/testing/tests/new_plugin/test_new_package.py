"""A package that `new-plugin` writes: its files, names that are refused, and that nothing half-written is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import heliograph
import pytest
import yaml
from heliograph.__main__ import main
from heliograph.packages.tests.facts import assert_facts
from heliograph_testing.new_plugin import command as new_plugin_command
from heliograph_testing.new_plugin.command import LONGEST, TEMPLATE, names_of, write_package

ROOT = Path(heliograph.__file__).parent
LONG = "z" * LONGEST


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_command_writes_a_package_and_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", "loss-report"]) == 0
    assert files(tmp_path) == [
        "heliograph-loss-report/.github/workflows/release.yml",
        "heliograph-loss-report/.github/workflows/tests.yml",
        "heliograph-loss-report/.gitignore",
        "heliograph-loss-report/README.md",
        "heliograph-loss-report/pyproject.toml",
        "heliograph-loss-report/src/heliograph_loss_report/__init__.py",
        "heliograph-loss-report/src/heliograph_loss_report/py.typed",
        "heliograph-loss-report/tests/test_loss_report.py",
    ]
    said = capsys.readouterr().out
    assert_facts(said, "'loss_report'", "heliograph-loss-report", "Next:\n")
    assert "trainer.plugins.load('loss_report')" in said
    texts = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()}
    assert not [name for name, text in texts.items() if "$" in text.replace("${{ matrix.", "")]
    jobs = yaml.safe_load(texts["tests.yml"])["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert "heliograph-loss-report" in texts["release.yml"]
    assert (tmp_path / "heliograph-loss-report").stat().st_mode == tmp_path.stat().st_mode | 0o055


@pytest.mark.parametrize("given", ["loss_report", "loss-report", "heliograph-loss-report", "heliograph_loss_report"])
def test_one_name_has_several_spellings(given: str) -> None:
    assert names_of(given) == {
        "name": "loss_report",
        "class_name": "LossReport",
        "module": "heliograph_loss_report",
        "distribution": "heliograph-loss-report",
        "requirement": f"heliograph>={heliograph.__version__}",
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "Invalid plugin name"),
        ("Loss", "use lower-case letters"),
        ("1st", "a letter first"),
        ("a__b", "single underscores or hyphens"),
        ("My-Pkg", "single underscores or hyphens"),
        ("../elsewhere", "Invalid plugin name"),
        ("caf\u00e9", "Invalid plugin name"),
        (LONG + "z", "at most 30 characters"),
        ("ema", "'ema' exists in"),
        ("ray", "heliograph-ray"),
        ("log", "'log' would be Log"),
        ("mapping", "would be Mapping"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_and_nothing_is_written(
    given: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-plugin", given, "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("heliograph new-plugin: ")
    assert words in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "heliograph-mine").mkdir()
    assert main(["new-plugin", "mine", "--folder", str(tmp_path)]) == 2
    assert "heliograph-mine exists: choose another" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_a_parent_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-plugin", "mine", "--folder", str(tmp_path / "nowhere")]) == 2
    assert_facts(capsys.readouterr().err, str(tmp_path / "nowhere"), "not a folder")


def test_an_error_on_the_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = tmp_path / "template"
    shutil.copytree(TEMPLATE, template)
    (template / "test_plugin.py.in").unlink()
    monkeypatch.setattr(new_plugin_command, "TEMPLATE", template)
    (tmp_path / "here").mkdir()
    with pytest.raises(FileNotFoundError, match="test_plugin"):
        write_package("mine", tmp_path / "here")
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("name", ["x", LONG])
def test_ruff_finds_nothing(name: str, tmp_path: Path) -> None:
    folder, _ = write_package(name, tmp_path)
    for command in (("check", "--no-cache", "."), ("format", "--no-cache", "--check", ".")):
        done = subprocess.run([sys.executable, "-m", "ruff", *command], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.whole
def test_mypy_finds_nothing(tmp_path: Path) -> None:
    folder, _ = write_package("loss_report", tmp_path)
    (tmp_path / "path").mkdir()
    (tmp_path / "path/heliograph").symlink_to(ROOT)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent"],  # as of an installed heliograph
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(tmp_path / "path")},
        capture_output=True,
        text=True,
    )
    assert_facts(done.stdout, "Success: no issues", "2 source files")


def test_a_wheel_has_the_template(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns(".*", "tests", "docs", "build", "runs", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "packages/testing", tmp_path / "copy", ignore=left_out)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", str(tmp_path), str(tmp_path / "copy")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = {
        name.rpartition("template/")[2] for name in zipfile.ZipFile(wheel).namelist() if "new_plugin/template" in name
    }
    assert held == {path.name for path in TEMPLATE.iterdir()}
