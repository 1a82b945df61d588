"""However often a run waits, its recordings are read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from heliograph.packages.recorder.tests.reruns.test_fork import program, trained
from heliograph_recorder import NotExact, goto
from heliograph_recorder.format.reader import Parser
from heliograph_recorder.reruns.recorded import RecordedRun


def test_both_recordings_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "x")
    walks: list[str] = []
    parsed: list[int] = []

    def course_after(self: RecordedRun, origin: Any, former: Any = RecordedRun.course_after) -> Any:
        walks.append("the recorded run")
        return former(self, origin)

    def add(self: Parser, data: bytes, *, is_end: bool, former: Any = Parser.add) -> None:
        parsed.append(len(data))
        former(self, data, is_end=is_end)

    monkeypatch.setattr(RecordedRun, "course_after", course_after)
    with goto(tmp_path / "x", program, step=5) as paused:
        seen = len(walks)
        monkeypatch.setattr(Parser, "add", add)
        while paused.next_event() is not None:
            assert paused.comparison.first is None
        assert len(walks) == seen
        assert paused.run.report.recording is not None
        assert 0 < sum(parsed) <= Path(paused.run.report.recording).stat().st_size
        assert paused.comparison.digested == 7  # since the checkpoint of step 3


def test_a_difference_is_found_at_the_event_at_which_it_is_recorded(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    with goto(tmp_path / "x", program, step=5) as paused:
        paused.next_step()
        paused.run.optimizer.param_groups[0]["lr"] *= 2
        with pytest.raises(NotExact, match="step 6: the learning"):
            paused.finish()
