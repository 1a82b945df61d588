"""The configuration saved beside a run: no other training's file is touched, changes are said."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph.packages.cli.tests.conftest import Command
from heliograph_cli.command import differences, flat_values

FRESH = "--trainer.plugins=lesson.Kill"  # nothing is resumed, nothing is written


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.config.yaml")}


def test_another_training_in_the_folder_has_a_file_of_its_own(fit: Command, folder: Path) -> None:
    assert fit(FRESH, "--scheduler=null", "--folder=saved", "--epochs=1") == 0
    first = files(folder / "saved")
    assert fit(FRESH, "--scheduler=null", "--folder=saved", "--epochs=2") == 0
    assert fit(FRESH, "--scheduler=null", "--folder=saved", "--name=other") == 0
    now = files(folder / "saved")
    assert set(now) == {"run.config.yaml", "run-2.config.yaml", "other.config.yaml"}
    assert now["run.config.yaml"] == first["run.config.yaml"]
    assert len({text.split("\n")[0] for text in now.values()}) == 3, "each names its run"


def test_a_file_that_is_not_ours_stays(fit: Command, folder: Path) -> None:
    (folder / "runs").mkdir()
    (folder / "runs/run.config.yaml").write_text("mine: true\n")
    assert fit("--epochs=1") == 0
    now = files(folder / "runs")
    assert now["run.config.yaml"] == "mine: true\n"
    assert "epochs: 1" in now["run-2.config.yaml"]


def test_folder_wins_over_that_of_the_checkpoints(fit: Command, folder: Path) -> None:
    assert fit("--epochs=1", "--folder=saved") == 0
    assert set(files(folder / "saved")) == {"run.config.yaml"}
    assert files(folder / "runs") == {}


def test_without_a_folder_the_run_notes_it(fit: Command, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(FRESH, "--scheduler=null", "--epochs=1") == 0
    assert "saved: pass --folder=...," in capsys.readouterr().out
    assert list(folder.rglob("*.config.yaml")) == []


def test_values_are_named_by_the_words_that_lead_to_them() -> None:
    config = {
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}, "dict_kwargs": {"a": [1, 2]}},
        "list": [{"class_path": "a.B"}, {"class_path": "a.C", "init_args": {"d": None}}],
        "steps": 3,
    }
    assert flat_values(config) == {
        "optimizer": "torch.optim.SGD",
        "optimizer.lr": 0.1,
        "optimizer.a": [1, 2],
        "list.0": "a.B",
        "list.1": "a.C",
        "list.1.d": None,
        "steps": 3,
    }


def test_differences_are_said_in_words() -> None:
    assert differences({"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3, "d": "x"}) == [
        "b 2 -> 3",
        "c None -> (none)",
        "d (none) -> 'x'",
    ]
