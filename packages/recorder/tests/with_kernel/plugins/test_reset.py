"""`Plugin.reset`: when it is called, and what its errors do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heliograph import Plugin, Run, TrainStart, on
from heliograph.tests.kit import fit
from heliograph_recorder import Recorder, replay


class Memory(Plugin):
    """Writes down what is called, and when."""

    def __init__(self, calls: list[str] | None = None) -> None:
        self.calls: list[str] = [] if calls is None else calls

    def reset(self) -> None:
        self.calls.append(f"{self.name} reset")

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        self.calls.append(f"{self.name} begin")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state: Any) -> None:
        self.calls.append(f"{self.name} load {state['calls']}")


def test_a_replay_resets_too(tmp_path: Path) -> None:
    recording = fit(Recorder(tmp_path)).recording
    memory = Memory()
    assert recording is not None
    replay(recording, [memory])
    assert memory.calls == ["memory reset", "memory begin"]
