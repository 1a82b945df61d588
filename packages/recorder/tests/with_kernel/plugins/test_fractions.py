"""Filters that count fractions of a run, and intervals that begin later."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph.tests.kit import class_batches, fit
from heliograph.tests.plugins.test_fractions import Marks
from heliograph_recorder import replay
from heliograph_recorder.plugin import Recorder

# Fractions of the planned steps.


def test_a_replay_knows_the_planned_steps(tmp_path: Path) -> None:
    fit(Recorder(tmp_path), train=class_batches(10), epochs=1.5)
    marks = Marks()
    report = replay(tmp_path, [marks])
    assert not report.failed
    assert marks.steps == [3, 6, 9, 12, 15]


def test_a_replay_says_what_it_does_not_know(tmp_path: Path) -> None:
    fit(Recorder(tmp_path), train=iter(class_batches(4)), epochs=1)
    with pytest.raises(ValueError, match="run with steps="):
        replay(tmp_path, [Marks()])


# Intervals that begin later.
