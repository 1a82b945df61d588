"""JsonlLog: every line parses, no step twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heliograph import Every, JsonlLog, LogSchedule, Trainer
from heliograph.tests.builtin_callbacks.test_jsonl_log import Make, places
from heliograph_recorder import Recorder, replay


def test_a_replay_has_a_file_of_its_own(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    trainer = Trainer([JsonlLog(log), LogSchedule(Every(steps=1)), Recorder(tmp_path / "recorded")], device="cpu")
    trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)
    replayed = replay(tmp_path / "recorded", [JsonlLog(log)])

    assert (replayed.unheld, replayed.failed) == ({}, {})
    assert places(tmp_path / "log-2") == places(log)
