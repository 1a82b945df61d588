"""What all trackers have in common, with one that writes to a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heliograph.tests.builtin_callbacks.test_tracker import Make, Pages, fit, steps
from heliograph_recorder import Recorder, replay


def test_a_recording_is_replayed_onto_a_page(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    fit([Recorder(tmp_path)], task(), batches(3), sgd)
    tracker = Pages({})
    replayed = replay(tmp_path, [tracker])

    assert (replayed.unheld, replayed.failed) == ({}, {})
    assert steps(tracker.store["page-0"]) == [1, 2, 3]
