"""`RunResult.explain`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from heliograph.core.result import ResumeReport, RunResult
from heliograph.events import History, Progress, Request
from heliograph.packages.recorder.tests.explain.factory import killed_and_resumed
from heliograph.packages.recorder.tests.recordings import attempt, write
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder.explain.story import story
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import AttemptRecord, Counters, EventEntry

HISTORY = History(
    [
        Request("log", "log_schedule", "every 2 steps", 0, 2, 2, event="batch_end"),
        Request("log", "log_schedule", "every 2 steps", 0, 4, 4, event="batch_end"),
        Request("stop", "early_stopping", "no better", 1, 0, 4, rank=1, event="validation_end"),
    ]
)
RESULT = RunResult(
    status="stopped",
    reason="no better",
    stopped_by="early_stopping",
    progress=Progress(epoch=1, steps=4, samples=1200),
    metrics={"train/loss": 0.5},
    best_checkpoint=Path("best.pth"),
    last_checkpoint=Path("last.pth"),
    history=HISTORY,
    seconds=2.5,
    stopped_on_rank=1,
    resume=ResumeReport(path=Path("old.pth"), epoch=0, batch=0, step=2),
    notes=("resumed at step 2 from old.pth",),
    plugin_errors={"bar": ("log at step 2: OSError: gone",)},
    plugin_seconds={"bar": 0.25, "early_stopping": 0.5},
)


def test_warnings_come_after_the_end() -> None:
    text = replace(RESULT, warnings=("Nothing was saved.",)).explain()
    assert_facts(text, "train/loss 0.5", "\n\nwarnings\n", "Nothing was saved.", "\n\nrequests\n")


def test_without_a_recorder_the_story_comes_from_the_result() -> None:
    text, _, hint = RESULT.explain().partition("\n\nnot included\n")
    assert text == (
        "the run: stopped by early_stopping on rank 1\n"
        "  no better\n"
        "  requested during validation_end, at epoch 1, batch 0, step 4\n"
        "  epoch 1, batch 0, step 4, 1,200 samples in 2.50 s\n"
        "  train/loss 0.5\n"
        "\n"
        "requests\n"
        "  log   twice  log_schedule, step 2 to 4: every 2 steps\n"
        "  stop  once   early_stopping on rank 1, during validation_end, epoch 1, batch 0, step 4: no better\n"
        "\n"
        "plugins that failed\n"
        "  failed  bar on log at step 2: OSError: gone\n"
        "\n"
        "notes\n"
        "  resumed at step 2 from old.pth"
    )
    assert_facts(hint, "add a Recorder")


def test_with_a_recording_it_is_what_explain_prints(tmp_path: Path) -> None:
    path = write(tmp_path / "digits.recording", *killed_and_resumed().attempts)
    assert replace(RESULT, recording=path).explain() == story(read(path))


def test_a_recording_that_is_gone_is_reported(tmp_path: Path) -> None:
    text = replace(RESULT, recording=tmp_path / "gone.recording").explain()
    assert_facts(text.splitlines()[0], "the run: stopped", "early_stopping on rank 1")
    assert "cannot be read:" in " ".join(text.split())


@pytest.mark.parametrize(
    ("attempts", "why"),
    [
        ((), "cannot be read: "),
        ((attempt(EventEntry("train_start", 0.0, Counters())),), "has no end"),
    ],
    ids=["nothing", "no end"],
)
def test_a_run_whose_recording_has_no_end_is_not_called_killed(
    attempts: tuple[AttemptRecord, ...], why: str, tmp_path: Path
) -> None:
    text = replace(RESULT, recording=write(tmp_path / "digits.recording", *attempts)).explain()
    assert_facts(text.splitlines()[0], "the run: stopped", "early_stopping on rank 1")
    assert f"recording, which {why}" in " ".join(text.split())


def test_requests_that_the_history_dropped_are_counted() -> None:
    history = History([], maxlen=2)
    for step in range(5):
        history.add(Request("log", f"plugin_{step}", "", 0, step, step))
    text = replace(RESULT, history=history).explain()
    assert_facts(text, "not included\n", "the 3 requests", "latest 2")
