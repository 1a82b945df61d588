"""ProgressBar: which bars, where they stand, when they close; plain lines."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from heliograph import Every, LogSchedule, Trainer
from heliograph.packages.tests.facts import has_facts
from heliograph.tests.builtin_callbacks.progress_bar.test_progress_bar import Make, bar, plain, written
from heliograph_recorder import Recorder, replay

# Plain lines.


@pytest.mark.parametrize("drawn", [True, False])
def test_it_follows_a_replay(task: Make, batches: Make, sgd: Any, tmp_path: Path, drawn: bool) -> None:
    trainer = Trainer([Recorder(tmp_path), LogSchedule(Every(steps=2))], device="cpu")
    result = trainer.fit(task(), batches(3), optimizer=sgd, epochs=2)
    trainer.test(task(), batches(1))
    plugin = bar() if drawn else plain(io.StringIO())
    replayed = replay(tmp_path, [plugin])

    assert "progress would have requested" in str(replayed)
    assert not replayed.failed
    assert not replayed.unheld
    lines = written(plugin)
    assert any(has_facts(line, "run  completed", "step 6") for line in lines)
    assert any(f"train/loss {result.metrics['train/loss']:.4g}" in line for line in lines)
    assert any(line.split()[:5] == ["run", "test", "batches", "1", "00:00"] for line in lines)


# Warnings.


# Where it writes.
