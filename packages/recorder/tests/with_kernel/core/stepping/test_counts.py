"""Losses that are sums over tokens, each with its count: a window is as one batch of all its tokens."""

from __future__ import annotations

from pathlib import Path

from heliograph import GradientAccumulation
from heliograph.tests.core.stepping.test_counts import COUNTS, Seen, fit
from heliograph_recorder import Recorder, replay

# A window is as one batch.


# On a device, whose counts are read once a step.


# On several ranks.


# What is logged.


# Counters, resume, replay.


def test_a_replay_counts_the_tokens(tmp_path: Path) -> None:
    seen, again = Seen(), Seen()
    result, _ = fit(GradientAccumulation(2), seen, Recorder(tmp_path), epochs=2)
    assert result.recording is not None
    replay(result.recording, [again])
    assert (again.tokens, again.every, again.at) == (seen.tokens, seen.every, seen.at)
    assert again.tokens[-1] == 2 * sum(COUNTS)


# A loop of one's own.


# What is refused.
