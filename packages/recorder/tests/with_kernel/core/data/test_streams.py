"""Trainings on several streams: what a user gives and gets, and resumes from every step, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
from heliograph.tests.core.data.test_streams import LOADING, Samples, fitted
from heliograph_recorder import Recorder, replay


def test_a_replay_says_that_streams_are_not_recorded(tmp_path: Path) -> None:
    class Asks(h.Plugin):
        def __init__(self, ask: Callable[[h.Run], Any]) -> None:
            self.ask = ask
            self.errors = list[str]()

        @h.on(h.BatchEnd)
        def try_it(self, run: h.Run, event: h.BatchEnd) -> None:
            try:
                self.ask(run)
            except h.NotRecorded as error:
                self.errors.append(str(error))

    fitted({"a": Samples(4), "b": Samples(4)}, Recorder(tmp_path), loader_params=LOADING)
    counts, stream = Asks(lambda run: run.progress.streams["a"]), Asks(lambda run: run.data.stream)
    replay(tmp_path, [counts, stream.named("stream")])
    assert counts.errors == ["A recording does not hold the number of batches of each stream."] * 4
    assert stream.errors == ["A recording does not hold 'stream' of the data."] * 4
