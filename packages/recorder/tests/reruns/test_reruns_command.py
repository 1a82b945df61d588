"""The commands `diverge`, `goto` and `fork`."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.__main__ import main
from heliograph.packages.recorder.tests.mutated_programs import Program, make
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder import PausedRun, Recorder, diverge, fork

PROGRAM = "heliograph.packages.recorder.tests.reruns.test_reruns_command:program"
UNFIT = "heliograph.packages.recorder.tests.reruns.test_reruns_command:unfit"
INTERRUPT = "heliograph.packages.recorder.tests.reruns.test_reruns_command:interrupt"
OTHER = "heliograph.packages.recorder.tests.reruns.test_reruns_command:other"


def program(folder: Path) -> Any:
    """Return the trainer and the keywords of its fit."""
    return make(Program(3), folder)


def other(folder: Path) -> Any:
    """Return those of another program."""
    return make(Program(3, "operator"), folder)


def halve_rate(run: h.Run) -> None:
    """Change the learning rate."""
    run.optimizer.param_groups[0]["lr"] /= 2


def _divide_rate(run: h.Run, by: float) -> None:
    run.optimizer.param_groups[0]["lr"] /= by


divide_rate = partial(_divide_rate, by=4)


def fail(run: h.Run) -> None:
    """Fail, in a function of one's own."""
    _divide(0)


def _divide(number: int) -> float:
    try:
        return 1 / number
    except ZeroDivisionError:
        raise ValueError("the rate is wrong") from None


def unfit(run: h.Run) -> None:
    """Be no program, but a change."""
    run.optimizer.zero_grad()


def interrupt(folder: Path) -> Any:
    """Interrupt, as Ctrl-C does while a program is made."""
    raise KeyboardInterrupt


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with two runs."""
    for name, make_trainer in (("a", program), ("b", other)):
        trainer, options = make_trainer(tmp_path / name)
        trainer.fit(**options)
    return tmp_path


def test_diverge(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diverge", str(runs / "a"), str(runs / "b")]) == 1
    divergence = diverge(runs / "a", runs / "b")
    assert capsys.readouterr().out == f"{divergence}\n"
    assert main(["diverge", str(runs / "a"), str(runs / "b"), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert divergence.first is not None
    assert (facts["schema"], facts["equal"], facts["first"]["kind"], facts["first"]["step"]) == (
        "heliograph.diverge/1",
        False,
        divergence.first.kind,
        divergence.first.step,
    )


def test_diverge_of_equal_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, options = program(runs / "c")
    trainer.fit(**options)
    assert main(["diverge", str(runs / "a"), str(runs / "c")]) == 0
    assert capsys.readouterr().out.startswith("No difference in ")


def test_diverge_of_runs_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        trainer, options = program(tmp_path / name)
        trainer.plugins.unregister("recorder")
        trainer.plugins.register(Recorder(tmp_path / name))
        trainer.fit(**options)
    assert main(["diverge", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert capsys.readouterr().out.startswith("These runs cannot")


def test_diverge_with_a_drill(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diverge", str(runs / "a"), str(runs / "b"), "--drill", PROGRAM, "--drill", OTHER]) == 1
    assert "aten.mul.Tensor" in capsys.readouterr().out


def test_goto_opens_a_prompt(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("print(run.progress.steps)\nprint(paused.next_step())\nprint(paused)\n")
    )
    assert main(["goto", str(runs / "a"), PROGRAM, "--step", "5"]) == 0
    captured = capsys.readouterr()
    assert_facts(captured.err, "<PausedRun", "gradients_ready", "step 4", "batch ")
    printed = [line.removeprefix(">>> ") for line in captured.out.splitlines()]
    assert printed[:2] == ["4", "GradientsReady()"]
    assert_facts(printed[2], "<PausedRun", "gradients_ready", "step 5", "batch ")
    public = {name for name in dir(PausedRun) if not name.startswith("_")} - {"close"}
    assert {word.partition("(")[0] for word in re.findall(r"\.(\w+)", captured.err.partition("\n")[2])} >= public


@pytest.mark.parametrize(
    "arguments",
    [
        ["goto", "a", INTERRUPT, "--step", "3"],
        ["fork", "a", INTERRUPT, "--at", "3", "--into", "c"],
        ["diverge", "a", "b", "--drill", INTERRUPT],
    ],
)
def test_an_interrupt_is_one_line(
    arguments: list[str], runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    assert main(arguments) == 130
    assert capsys.readouterr().err == f"heliograph {arguments[0]}: interrupted\n"
    assert not (runs / "c").exists()


def test_goto_into_a_fork(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fork(runs / "a", PROGRAM, at=5, into=runs / "c", change=halve_rate)
    for path in (runs / "c").glob("*.pth"):
        path.unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO("print(paused.comparison.first)\n"))
    assert main(["goto", str(runs / "c"), PROGRAM, "--step", "7"]) == 2
    assert "(--change on" in capsys.readouterr().err
    change = f"{PROGRAM.partition(':')[0]}:halve_rate"
    assert main(["goto", str(runs / "c"), PROGRAM, "--step", "7", "--change", change]) == 0
    assert capsys.readouterr().out.splitlines()[0].removeprefix(">>> ") == "None"


def test_diverge_with_a_drill_of_a_fork(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = f"{PROGRAM.partition(':')[0]}:halve_rate"
    fork(runs / "a", PROGRAM, at=5, into=runs / "c", change=change)
    arguments = ["diverge", str(runs / "a"), str(runs / "c"), "--drill", PROGRAM]
    assert main(arguments) == 2
    assert "give the same function" in capsys.readouterr().err
    assert main([*arguments, "--change", change]) == 1
    assert "differs from its rerun" not in capsys.readouterr().out


def test_fork(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = f"{PROGRAM.partition(':')[0]}:halve_rate"
    arguments = ["fork", str(runs / "a"), PROGRAM, "--at", "5", "--into", str(runs / "c"), "--change", change]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("completed: 4 epochs done")
    found = diverge(runs / "a", runs / "c").first
    assert found is not None
    assert (found.kind, found.step) == ("learning_rate", 6)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["diverge", "nowhere", "b"], "recording at nowhere"),
        (["diverge", "a", "a"], "give two recordings"),
        (["diverge", "a", "b", "--drill", "x", "--drill", "y", "--drill", "z"], "--drill is given at most"),
        (["diverge", "a", "b", "--change", "x:y"], "--change only with it"),
        (["diverge", "a", "b", "--drill", UNFIT], f"{UNFIT} failed"),
        (["goto", "a", UNFIT, "--step", "3"], f"{UNFIT} failed"),
        (["fork", "a", UNFIT, "--at", "3", "--into", "c"], f"{UNFIT} failed"),
        (["goto", "a", f"{UNFIT[:-5]}Path", "--step", "3"], f"{UNFIT[:-5]}Path is not a"),
        (["fork", "a", PROGRAM, "--into", "c"], "earlier at= (--at"),
        (["goto", "a", "nowhere", "--step", "3"], "as module:function"),
        (["goto", "a", PROGRAM, "--step", "99"], "no step 99"),
        (["goto", "b", PROGRAM, "--step", "9"], "sets task.mutation differently"),
        (["fork", "a", PROGRAM, "--into", "b"], "already has a training"),
        (["fork", "a", PROGRAM, "--into", "c", "--change", "nowhere:x"], "no module 'nowhere'"),
    ],
)
def test_errors(
    arguments: list[str], error: str, runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert error in text
    assert text.count("\n") == 1
    assert not re.search(r"(?<!\.)\.\.(?!\.)", text)  # two full stops
