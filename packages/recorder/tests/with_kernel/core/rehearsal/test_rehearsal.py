"""What a rehearsal does and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from heliograph import (
    Checkpoint,
    Every,
    FileLog,
    JsonlLog,
    LogSchedule,
    RNGCapture,
    SaveSchedule,
    TensorBoard,
    Trainer,
    ValidationSchedule,
)
from heliograph.core.rehearsal.report import Rehearsal
from heliograph.tests.kit import adam, class_batches, linear_classifier
from heliograph_recorder import Recorder

SINK: list[Any] = []  # of the module, and so out of reach: what objects hold is put back


@pytest.fixture(autouse=True)
def _empty() -> None:
    SINK.clear()


def planned(folder: Path, *more: Any, **options: Any) -> list[Any]:
    """Return the plugins of a long training, which log, validate and save every ten epochs."""
    every = Every(epochs=10)
    schedules = [LogSchedule(every), ValidationSchedule(every), SaveSchedule(every)]
    return [RNGCapture(), *schedules, Checkpoint(folder / "runs", **options), *more]


def rehearse(plugins: list[Any], task: Any = None, train: Any = None, **options: Any) -> Rehearsal:
    options = {"optimizer": adam(), "epochs": 100, "validation": class_batches(3), **options}
    task = linear_classifier() if task is None else task
    return Trainer(plugins, device="cpu").rehearse(task, class_batches(5) if train is None else train, **options)


def test_files_of_built_ins_go_elsewhere(tmp_path: Path) -> None:
    loggers = [JsonlLog(tmp_path / "log.jsonl"), TensorBoard(tmp_path / "board"), FileLog(tmp_path / "logs")]
    found = rehearse(planned(tmp_path, *loggers, Recorder(tmp_path / "recordings")))
    assert found.ok
    assert set(found.redirected) == {"checkpoint", "jsonl_log", "tensorboard", "file_log", "recorder"}
    assert list(tmp_path.iterdir()) == []
