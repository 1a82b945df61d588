"""The demo: it is killed, resumes, ends equal, and removes only its own files.

`make test` runs a short one, as the README says (packages/tests/test_readme.py).
"""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path

import heliograph as h
import pytest
import torch
from heliograph.__main__ import main
from heliograph.core.checkpoint.storage import Store
from heliograph.events import History
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder.demo import digits


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the output of a demo."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "heliograph", "demo", "--folder", str(folder)]
    return folder, subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.whole
def test_the_demo_is_killed_resumed_and_ends_equal(demonstrated: tuple[Path, str]) -> None:
    killed, resumed = demonstrated[1].split("Killed by SIGKILL in")
    assert "epoch 16, after step" in resumed
    assert "epochs" not in killed
    found = re.search(r"^killed, .* step (\d+),", resumed, re.MULTILINE)
    assert found is not None, resumed  # from the save before, where that in the background was not finished
    repeated = 258 - int(found[1])
    assert_facts(resumed, "result.resume: ", f"verified: {repeated} repeated", "bitwise identical")
    prints = re.findall(r"^\s+(\w[\w ]*?)\s+([0-9a-f]{16}) == ([0-9a-f]{16})$", resumed, re.MULTILINE)
    assert [name for name, _, _ in prints] == ["weights", "optimizer", "scheduler", "random generators"]
    assert all(one == other for _, one, other in prints)
    assert "equals the uninterrupted run" in resumed
    assert "stopped by early_stopping: validation/loss" in resumed
    assert float(resumed.split("test accuracy ")[1].split("%")[0]) >= 97.0


@pytest.mark.whole
def test_the_demo_writes_its_files_and_removes_only_these(demonstrated: tuple[Path, str]) -> None:
    folder, _ = demonstrated
    left = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert {"curves.png", "log.jsonl", "checkpoints/digits.last", "uninterrupted/checkpoints/digits.best"} <= set(left)
    assert len([name for name in left if fnmatch(name, "checkpoints/digits_epoch_*_iter_*_accuracy_*.pth")]) in (2, 3)
    assert len([name for name in left if fnmatch(name, "digits_*.log")]) == 1
    assert [name for name in left if fnmatch(name, "tensorboard/events.out.tfevents.*")]
    assert len([name for name in left if fnmatch(name, "digits_*.recording")]) == 1
    assert "timeline.html" in left

    h.Checkpoint(folder).pin(next(folder.glob("checkpoints/*.pth")))
    (folder / "checkpoints/.digits.data.tmp").touch()
    mine = [folder / name for name in ("notes.txt", "checkpoints/mine.pth", "uninterrupted/digits.log")]
    for path in mine:
        path.touch()
    digits.remove_outputs(folder)
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == sorted(mine)


def test_a_demo_that_runs_is_not_disturbed_by_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").touch()
    with closing(Store(tmp_path / "checkpoints", "digits")) as store:
        store.open()
        assert main(["demo", "--folder", str(tmp_path)]) == 1
    assert "heliograph demo: The checkpoints" in capsys.readouterr().err
    assert (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize("number", ["0", "-3", "many"])
def test_a_number_of_epochs_that_cannot_be_removes_nothing(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--folder", str(tmp_path), "--epochs", number])
    assert caught.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f", got {number!r}")
    assert (tmp_path / "log.jsonl").exists()


def test_a_demo_that_ends_unequal_says_so_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = h.Progress(epoch=2, steps=24)
    resume = h.ResumeReport(path=Path("digits.pth"), epoch=1, batch=5, step=12)
    result = h.RunResult("completed", "2 epochs done", None, progress, {}, None, None, History(), 1.0, resume=resume)
    best = {"validation/loss": 0.5, "validation/accuracy": 0.5}
    parts = [("weights", "a" * 64, "a" * 64), ("optimizer", "a" * 64, "b" * 64)]
    said = digits.summary(result, best, 0.5, parts, Path())
    assert "killed, then resumed at epoch 1, batch 5, step 12, from digits.pth\n" in said
    assert f"  weights            {'a' * 16} == {'a' * 16}\n  optimizer          {'a' * 16} != {'b' * 16}\n" in said
    assert "  NOT EQUAL" in said
    assert "bit for bit" not in said
    monkeypatch.setattr(digits, "run_demo", lambda folder, epochs: False)
    assert main(["demo"]) == 1


def test_the_fingerprint_depends_on_every_bit() -> None:
    state = {"a": [torch.zeros(3), 1.0], "b": (None, "text")}
    same = {"a": [torch.zeros(3), 1.0], "b": (None, "text")}
    assert digits.fingerprint(state) == digits.fingerprint(same)
    others = [
        {**state, "a": [torch.tensor([0.0, 0.0, -0.0]), 1.0]},
        {**state, "a": [torch.zeros(3, dtype=torch.float64), 1.0]},
        {**state, "a": [torch.zeros(3, 1), 1.0]},
        {**state, "a": [torch.zeros(3), 1.0000000000000002]},
        {"a": state["a"]},
    ]
    assert len({digits.fingerprint(each) for each in (state, *others)}) == 6


def test_the_demo_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert_facts(said, "heliograph demo: ", "sklearn")
    assert said.endswith("): pip install 'heliograph[examples]'\n")
