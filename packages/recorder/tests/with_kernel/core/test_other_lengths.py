"""A resume whose epochs are of another length: it plans the steps that were done, and those that remain."""

from __future__ import annotations

from pathlib import Path

from heliograph import (
    Every,
    Plugin,
    Run,
    StepEnd,
    on,
)
from heliograph.tests.core.test_other_lengths import Seen, attempt
from heliograph_recorder import replay
from heliograph_recorder.plugin import Recorder


def test_a_replay_knows_the_new_length(tmp_path: Path) -> None:
    attempt(tmp_path / "run", Recorder(tmp_path / "recording"), epochs=2)
    attempt(tmp_path / "run", Recorder(tmp_path / "recording"), limit_train=0.5)
    seen = Seen()

    class Fifths(Plugin):
        @on(StepEnd, when=Every(fraction=0.2))
        def note(self, run: Run, event: StepEnd) -> None:
            seen.fifths.append(run.progress.steps)

    assert not replay(tmp_path / "recording", [Fifths()]).failed
    assert seen.fifths == [4, 7, 10, 13, 16, 20, 24]
