"""The command `heliograph golden`, and the fixture `golden`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from heliograph.packages.tests.facts import assert_facts
from heliograph_testing.command import golden

pytest_plugins = ["pytester"]
PROGRAM = """
import torch
from torch import nn

import heliograph as h


def make(lr=0.1):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]
    task = h.Supervised(model, nn.functional.mse_loss)
    options = {"task": task, "train": batches, "optimizer": lambda p: torch.optim.SGD(p, lr), "epochs": 1}
    return h.Trainer([h.RNGCapture(seed=1)], device="cpu"), options


def faster():
    return make(0.2)


def fails():
    raise OSError("no data")
"""


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "golden_program.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "golden_program", raising=False)


def test_record_and_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert golden(["record", "golden_program:make", "golden.json"]) == 0
    assert_facts(capsys.readouterr().out, "5 steps", "golden.json")
    assert golden(["check", "golden_program:make", "golden.json"]) == 0
    assert golden(["check", "golden_program:faster", "golden.json"]) == 1
    assert_facts(capsys.readouterr().out, "learning_rate", "lr of optimizer was 0.1 and is 0.2")
    assert golden(["check", "golden_program:faster", "golden.json", "--rtol", "9"]) == 0
    capsys.readouterr()
    assert golden(["record", "golden_program:make", "operators.json", "--steps", "1", "--operators"]) == 0
    assert golden(["check", "golden_program:make", "operators.json"]) == 0
    capsys.readouterr()
    assert golden(["check", "golden_program:faster", "golden.json", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["schema"], facts["equal"], facts["difference"]["what"]) == (
        "heliograph.golden/1",
        False,
        "learning_rate",
    )


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["check", "golden_program:make", "missing.json"], ("missing.json",)),
        (["record", "golden_program:nothing", "golden.json"], ("nothing",)),
        (["record", "golden_program:fails", "golden.json"], ("OSError", "no data", "the recording failed")),
        (["check", "golden_program:fails", "."], (". cannot be read",)),  # the program would fail
        (["check", "golden_program:fails", "missing.json", "--rtol", "-1"], ("rtol", "-1")),
        (["record", "golden_program:fails", "missing/golden.json"], ("missing/golden.json cannot be written",)),
        (["record", "golden_program:make", "golden.json", "--steps", "0"], ("steps", "0")),
    ],
)
def test_errors_have_status_two(
    arguments: list[str], facts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert golden(arguments) == 2
    assert_facts(capsys.readouterr().err, *facts)


def test_a_changed_field_is_found_before_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert golden(["record", "golden_program:make", "golden.json"]) == 0
    content = json.loads(Path("golden.json").read_text())
    for field in ("steps", "every", "settings", "facts"):
        Path("changed.json").write_text(json.dumps(content | {field: None}), encoding="utf-8")
        assert golden(["check", "golden_program:fails", "changed.json"]) == 2
        assert_facts(capsys.readouterr().err, "changed.json is not a golden run", "None")


def test_the_fixture_records_and_compares(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(golden_program=PROGRAM)
    path = pytester.makepyfile("import golden_program\n\ndef test_it(golden):\n    golden(golden_program.make)\n")
    result = pytester.runpytest_inprocess()  # pytest finds the fixture by its entry point
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("*--golden-update*")
    pytester.runpytest_inprocess("--golden-update").assert_outcomes(passed=1)
    assert (path.parent / "golden" / "test_it.json").exists()
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
    path.write_text(path.read_text().replace("program.make", "program.faster"), encoding="utf-8")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("*learning_rate*")
