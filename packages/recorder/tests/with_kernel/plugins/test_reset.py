"""`Plugin.reset`: when it is called, and what its errors do."""

from __future__ import annotations

from pathlib import Path

from heliograph.tests.kit import fit
from heliograph.tests.plugins.test_reset import Memory
from heliograph_recorder import Recorder, replay


def test_a_replay_resets_too(tmp_path: Path) -> None:
    recording = fit(Recorder(tmp_path)).recording
    memory = Memory()
    assert recording is not None
    replay(recording, [memory])
    assert memory.calls == ["memory reset", "memory begin"]
