"""`python -m heliograph verify-resume`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from heliograph.__main__ import main
from heliograph.packages.tests.facts import assert_each, assert_facts

PROGRAM = """
import torch
from heliograph import RNGCapture, Supervised, Trainer
from torch import nn


def training(*plugins):
    torch.manual_seed(0)
    task = Supervised(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)), nn.functional.mse_loss)
    batches = [(torch.ones(2, 3), torch.ones(2, 1))] * 5
    adam = lambda parameters: torch.optim.Adam(parameters, 0.1)
    return Trainer(plugins, device="cpu"), {"task": task, "train": batches, "optimizer": adam, "epochs": 2}


def good(folder):
    return training(RNGCapture())


def bad():
    return training()


def failing():
    raise RuntimeError("the disk is gone")


def exiting():
    raise SystemExit(0)


def endless():
    trainer, options = training()
    return trainer, options | {"epochs": None}


number = 3
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a program in a folder, and make that the current one."""
    (tmp_path / "program_to_verify.py").write_text(PROGRAM)
    (tmp_path / "broken_program.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("program_to_verify", "broken_program"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def verify(*arguments: str) -> int:
    return main(["verify-resume", *arguments])


def test_the_status_is_0_if_a_resume_is_exact(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("program_to_verify:good") == 0
    assert capsys.readouterr().out.startswith("exact: ")


def test_the_status_is_1_if_it_is_not(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("program_to_verify:bad") == 1
    printed = capsys.readouterr().out
    assert_facts(printed, "NOT exact: attempt 2", "\n")
    assert_facts(printed, "untracked: random generators", "add RNGCapture()")


def test_options(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kills = ("--kill-at", "2", "--kill-at", "epoch_end:1")
    others = ("--save-every", "1", "--ignore", "rng_capture", "--resumes", "9")
    assert verify("program_to_verify:good", *kills, *others) == 0
    assert_each(
        capsys.readouterr().out.splitlines()[1:4],
        ("attempt 1: from the", "killed at epoch 0", "batch 2, in batch_end"),
        ("attempt 2: resumed", "epoch 0, batch 1", "step 1, killed at", "epoch 1, batch 0", "epoch_end"),
        ("attempt 3: resumed", "epoch 0, batch 5", "step 5", "to the end"),
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("program_to_verify", "as module:function"),
        (
            "program_to_verify:god",
            "Did you mean 'good'?",
        ),
        ("program_to_verify:number", "a function, got 3"),
        ("program_to_verfy:good", "no module 'program_to_verfy'"),
        ("program_to_verify.deeper:good", "no module 'program_to_verify.deeper'"),
        ("program_to_verify.py:good", "program_to_verify:good instead of program_to_"),
        (
            "./deep/program.py:good",
            "deep.program:good instead of ./deep/program.py:good",
        ),
        ("heliograph:Trainer --resumes 0", "least 1, got 0"),
        ("program_to_verify:endless", "pass epochs= or steps="),
        ("program_to_verify:good --kill-at soon", "--kill-at must be"),
        ("program_to_verify:good --kill-at 99", "kill_at=('batch_end', 99) is never reached"),
        ("program_to_verify:good --resumes 0", "least 1, got 0"),
    ],
)
def test_the_status_is_2_if_the_arguments_are_wrong(
    arguments: str, sentence: str, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(*arguments.split()) == 2
    printed = capsys.readouterr().err
    assert_facts(printed, "heliograph verify-resume: ", sentence)
    assert "Traceback" not in printed


def test_the_file_of_a_program_is_not_run_in_place_of_its_module(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Importing `train.py` as a module imports `train`, which may train for a day."""
    assert verify("program_to_verify.py:good") == 2
    assert "program_to_verify" not in sys.modules


def test_a_misspelt_module_gets_a_suggestion(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify("program_to_verfy:good")
    assert "'program_to_verify'? Known: broken_program, program_to_verify." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("broken_program:good", ("ModuleNotFoundError", "'no_such_package_at_all'")),
        ("program_to_verify:failing", ("RuntimeError: the disk", "gone")),
        ("program_to_verify:exiting", ("SystemExit: 0",)),
    ],
)
def test_the_status_is_2_if_the_program_fails(
    function: str, error: tuple[str, ...], program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(function) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("Traceback (most recent call")
    assert_facts(printed.err.splitlines()[-1], "heliograph verify-resume: ", function, *error)


def test_it_runs_with_python_m(program: Path) -> None:
    command = [sys.executable, "-m", "heliograph", "verify-resume", "program_to_verify:bad", "--resumes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("NOT exact: ")


def test_the_command_line_does_not_import_torch() -> None:
    code = "import sys, heliograph.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
