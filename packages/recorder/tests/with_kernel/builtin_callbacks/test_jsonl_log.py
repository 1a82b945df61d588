"""JsonlLog: every line parses, no step twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heliograph import Every, JsonlLog, LogSchedule, Trainer
from heliograph_recorder import Recorder, replay

Make = Callable[..., Any]


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def places(path: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in read(path)]


def test_a_replay_has_a_file_of_its_own(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    trainer = Trainer([JsonlLog(log), LogSchedule(Every(steps=1)), Recorder(tmp_path / "recorded")], device="cpu")
    trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)
    replayed = replay(tmp_path / "recorded", [JsonlLog(log)])

    assert (replayed.unheld, replayed.failed) == ({}, {})
    assert places(tmp_path / "log-2") == places(log)
