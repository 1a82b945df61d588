"""State that no `state_dict` holds: restored if it is plain data of a module or the task, else reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
from heliograph.tests.core.objects.test_run_state import Job, reasons
from heliograph_recorder import Recorder

SAVED, STEPS = 6, 12


def test_all_built_in_plugins_are_exact_when_nothing_changes(tmp_path: Path) -> None:
    def plugins() -> list[Any]:
        schedules = [h.ValidationSchedule(h.Every(steps=2)), h.LogSchedule(h.Every(steps=2))]
        deciding = [h.EarlyStopping("train/loss", patience=50), h.NaNGuard(), h.GradientNorm()]
        reports = [
            h.JsonlLog(tmp_path / "log.jsonl"),
            h.ProgressBar(plain=True),
            h.HandlerTimes(),
            Recorder(tmp_path),
        ]
        return [h.GradientAccumulation(2), h.EMA(), *schedules[1:], *deciding, *reports]

    result, is_equal = Job(plugins=plugins).attempts(tmp_path)
    assert (reasons(result), is_equal) == ("", True), reasons(result)
