"""Questions about five recorded runs, answered with jq from the JSON of `status` alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from heliograph.packages.recorder.tests.explain import recorded_runs
from heliograph_recorder.command import status

jq = pytest.importorskip("jq", reason="needs jq: pip install jq")

QUESTIONS: dict[str, dict[str, Any]] = {
    "finished": {
        ".status": "completed",
        ".reason": "3 epochs done",
        ".by": None,  # no plugin stopped it
        ".progress.step": 12,
        ".progress.samples": 48,
        ".attempts | length": 1,
        ".metrics | keys": ["train/loss", "validation/loss"],
        '.metrics["validation/loss"] < 0.1': True,
        '.best_checkpoint | split("/") | last': "finished_epoch_3_iter_12.pth",
        "[.checkpoints[] | select(.pruned == null).step]": [12],
        '[.requests[] | select(.verb == "save" and .step == 4).reason] | first': "every 4 steps",
        ".requests | map(select(.served == false)) | length": 0,
        ".warnings": [],
    },
    "stopped": {
        ".status": "stopped",
        ".by": "early_stopping",
        '.reason | startswith("validation/loss has not improved")': True,
        '.requests[] | select(.verb == "stop") | [.epoch, .step, .event]': [2, 8, "validation_end"],
        '[.requests[] | select(.verb == "validation")] | length': 2,
        ".requests | map(.by) | unique": ["checkpoint", "early_stopping", "log_schedule", "validation_schedule"],
        ".progress | [.epoch, .batch]": [2, 0],
        "(.since | fromdate) >= (.began | fromdate)": True,
    },
    "resumed": {
        ".status": "completed",
        ".attempts | map(.status)": ["killed", "completed"],
        ".attempts[0].progress.step >= 4": True,
        '.attempts[1].restores[0].path | split("/") | last': "resumed_epoch_0_iter_4.pth",
        ".attempts[1].restores[0] | [.step, .is_roll_back]": [4, False],
        "[.checkpoints[] | select(.attempt == 1).step]": [4],
        ".checkpoints[0].pruned": "keep_last=1, keep_best=1",
        '.notes | map(select(startswith("attempt 2: resumed"))) | length': 1,
    },
    "failed": {
        ".status": "failed",
        ".reason": "OSError: the disk is gone",
        ".progress | [.epoch, .batch, .step]": [1, 1, 5],
        ".progress.step - .checkpoints[-1].step": 1,  # lost
        '.last_checkpoint | split("/") | last': "failed_epoch_0_iter_4.pth",
        '.notes | map(select(contains("1 step is lost"))) | length': 1,
    },
    "running": {
        ".status": "running",
        '[.reason, .by, (.best_checkpoint | endswith("running_epoch_0_iter_4.pth"))]': [None, None, True],
        ".progress.step | . >= 4 and . <= 6": True,  # the recorder writes in blocks
        ".progress.validations": 1,
        '.last_checkpoint | split("/") | last': "running_epoch_0_iter_4.pth",
    },
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("five")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, recorded_runs.__file__, path], check=True, env=environment, capture_output=True)
    return path


def test_there_are_40_questions() -> None:
    assert sum(map(len, QUESTIONS.values())) == 40


@pytest.mark.parametrize("run", QUESTIONS)
def test_jq_answers_questions(run: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / run / "status.json"  # printed while it trained
    if not file.exists():
        assert status([str(folder / run), "--json"]) == 0
    text = file.read_text() if file.exists() else capsys.readouterr().out
    answers = {program: jq.compile(program).input_text(text).first() for program in QUESTIONS[run]}
    assert json.loads(text)["schema"] == "heliograph.run/1"
    assert answers == QUESTIONS[run]
