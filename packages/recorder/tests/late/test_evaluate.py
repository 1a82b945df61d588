"""The command `evaluate`, alone and beside a training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from heliograph.__main__ import main
from heliograph.packages.recorder.tests.late import late_program
from heliograph.packages.recorder.tests.late.late_program import score, train
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder.late import command
from heliograph_recorder.late.files import Journal, read_evaluation

HERE = Path(late_program.__file__).parent
FUNCTION = "late_program:score"
NAMES = ["run_epoch_0_iter_1", "run_epoch_0_iter_2", "run_epoch_0_iter_3"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with three checkpoints."""
    monkeypatch.syspath_prepend(HERE)
    train(tmp_path / "run", steps=3, at=())
    return tmp_path / "run"


def test_each_checkpoint_is_evaluated_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(folder), FUNCTION]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" (")[0] for line in lines] == [
        f"{name}.pth: accuracy {accuracy}" for name, accuracy in zip(NAMES, ("0.5", "0.8", "0.7"), strict=True)
    ]
    plain = json.loads((folder / f"{NAMES[1]}.late.json").read_text())
    assert {key: plain[key] for key in ("schema", "checkpoint", "steps", "function", "metrics", "error")} == {
        "schema": "heliograph.late/1", "checkpoint": f"{NAMES[1]}.pth", "steps": 2, "function": FUNCTION,
        "metrics": {"accuracy": 0.8}, "error": "",
    }  # fmt: skip
    (folder / f"{NAMES[0]}.late.json").unlink()
    (folder / f"{NAMES[2]}.pth").unlink()
    assert main(["evaluate", str(folder), FUNCTION, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["schema"] == "heliograph.evaluate/1"
    assert [(item["is_new"], item["steps"], item["metrics"]["accuracy"]) for item in facts["evaluations"]] == [
        (False, 2, 0.8), (True, 1, 0.5),
    ]  # fmt: skip
    assert main(["evaluate", str(folder), FUNCTION]) == 0
    assert_facts(capsys.readouterr().out, "2 checkpoints were evaluated before", "remove", f"{NAMES[1]}.late.json")
    assert not [*folder.glob(".*late*")]


def test_an_error_is_named_and_the_rest_is_evaluated(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(checkpoint: Path) -> object:
        if checkpoint.stem == NAMES[0]:
            return {"accuracy": "high"}
        if checkpoint.stem == NAMES[1]:
            checkpoint.unlink()  # as the training would
            raise FileNotFoundError(checkpoint)
        return {"accuracy": float("nan")}

    import late_program as user_module  # type: ignore[import-not-found]  # as the command imports it

    monkeypatch.setattr(user_module, "score", fail)
    (folder / "other.pth").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="'steps' is reserved"):
        command.check_metrics({"steps": 1})
    with pytest.raises(TypeError, match=r"'loss' is tensor\(\[1., 1.\]\)"):
        command.check_metrics({"loss": torch.ones(2)})
    assert command.check_metrics({"loss": torch.tensor([0.5]), "flag": True}) == {"loss": 0.5, "flag": 1.0}
    assert main(["evaluate", str(folder), FUNCTION]) == 1
    captured = capsys.readouterr()
    assert_facts(captured.out, f"{NAMES[0]}.pth: TypeError", "'accuracy' is 'high'", f"{NAMES[2]}.pth: accuracy nan")
    assert_facts(captured.err, "skipped other.pth", f"{NAMES[1]}.pth was removed")
    assert "Traceback" not in captured.err  # nothing failed in the user's code
    failed, good = (read_evaluation(folder / f"{name}.late.json") for name in (NAMES[0], NAMES[2]))
    assert failed is not None
    assert failed.error.startswith("TypeError")
    assert good is not None
    assert str(good.metrics) == "{'accuracy': nan}"
    monkeypatch.setattr(user_module, "score", score)
    assert main(["evaluate", str(folder), FUNCTION]) == 0  # an error is not final
    assert capsys.readouterr().out.startswith(f"{NAMES[0]}.pth: accuracy 0.5")


def test_a_traceback_begins_in_the_users_code(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "def score(path):\n    raise RuntimeError('boom')\n\n\ndef none():\n    return {}\n"
    (folder / "user_score.py").write_text(module)
    (folder / "user_import.py").write_text("import user_score\nuser_score.score(0)\n")
    (folder / "user_syntax.py").write_text("def score(:\n")
    monkeypatch.syspath_prepend(folder)
    for name in NAMES[1:]:
        (folder / f"{name}.pth").unlink()
    places = (("user_score.py", "2"), ("user_import.py", "2"), ("user_syntax.py", "1"))
    for (name, line), status in zip(places, (1, 2, 2), strict=True):
        assert main(["evaluate", str(folder), f"{name.removesuffix('.py')}:score"]) == status
        first, second = capsys.readouterr().err.split("File ")[:2]
        assert_facts(second, name, f"line {line}")
        assert first.strip() in ("Traceback (most recent call last):", "")
    assert main(["evaluate", str(folder), "user_score:none"]) == 1
    captured = capsys.readouterr()
    assert (captured.out.count("takes 0 positional arguments"), captured.err) == (1, "")


def test_what_cannot_be_done_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, facts in (
        ([str(folder / "none"), FUNCTION], ("no checkpoint in", "none", "--follow")),
        ([str(folder), "late_program:scor"], ("late_program has no function 'scor'", "score")),
        ([str(folder), "late_program"], ("module:function",)),
        (["--follow", "s3://bucket/a/run", FUNCTION], ("'s3://bucket/a/run'", "runs/s3/bucket/a/run")),
    ):
        assert main(["evaluate", *arguments]) == 2
        assert_facts(capsys.readouterr().err, *facts)
    lock = command.lock_of(folder)
    lock.acquire()
    assert main(["evaluate", str(folder), FUNCTION]) == 2
    assert_facts(capsys.readouterr().err, str(os.getpid()), "wait for it")
    lock.release()


def test_following_ends_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(HERE)
    folder, looks = tmp_path / "run", []

    def pass_time(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            train(folder, steps=3, at=())
            Journal(folder, "run").mark(is_over=False)  # as if it still trained
        else:
            Journal(folder, "run").mark(is_over=True)

    monkeypatch.setattr(command, "sleep", pass_time)
    assert main(["evaluate", "--follow", str(folder), FUNCTION]) == 0
    assert len(looks) == 2
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_killed_evaluation_is_done_again(folder: Path) -> None:
    code = "import os, late_program, pathlib; late_program.score = lambda path: (print(path.stem, flush=True), input())"
    run = f"{code}; from heliograph.__main__ import main; main(['evaluate', {str(folder)!r}, {FUNCTION!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", run], cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{NAMES[0]}\n"
        process.send_signal(signal.SIGKILL)
    assert not [*folder.glob("*.late.json")]
    temporary = folder / f".{NAMES[0]}.late.json.1.late.tmp"  # as if it was killed while it wrote
    temporary.touch()
    assert main(["evaluate", str(folder), FUNCTION]) == 0
    assert len([*folder.glob("*.late.json")]) == 3
    assert not temporary.exists()
