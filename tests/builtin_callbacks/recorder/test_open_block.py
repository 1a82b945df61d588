"""Whatever the counters do from batch to batch, the tail has them; a regular batch costs one byte."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import heliograph as h
import pytest
from heliograph.builtin_callbacks.recorder import open_block
from heliograph.builtin_callbacks.recorder.format.reader import read
from heliograph.builtin_callbacks.recorder.format.records import Batches, Counters, EventEntry
from heliograph.builtin_callbacks.recorder.format.tail import BEGIN, FIRST_ROW, HAS_ROW, NOTES, ROW, Tail, tail_path
from heliograph.builtin_callbacks.recorder.open_block import OpenBlock
from heliograph.builtin_callbacks.recorder.plugin import Recorder
from heliograph.events import BatchEnd, Progress, Run
from heliograph.tests.recordings import fit
from hypothesis import given
from hypothesis import strategies as st


class Change(NamedTuple):
    """What changes with a batch."""

    hundredths: int
    steps: int
    skipped_steps: int
    skipped_batches: int
    samples: int
    tokens: int
    window: int
    missed: int


REGULAR = Change(0, 1, 0, 0, 8, 0, 0, 0)
OTHER = st.builds(
    Change, st.sampled_from([0, 1, 253, 254, 9_999]), *[st.integers(0, 2)] * 3, st.sampled_from([0, 3, 8]),
    *[st.integers(0, 2)] * 3,
)  # fmt: skip
CHANGES = st.lists(st.one_of(st.just(REGULAR), st.just(REGULAR._replace(hundredths=2)), OTHER), min_size=1, max_size=40)


@given(CHANGES, st.integers(1, 2))
def test_the_tail_has_the_counters_of_every_batch(changes: list[Change], optimizers: int) -> None:
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_block, "monotonic", lambda: now[0])
        patch.setattr("heliograph.builtin_callbacks.recorder.plugin.monotonic", lambda: now[0])
        expected, tail, _ = record(changes, optimizers, now)
    assert tail.rows(BEGIN + len(changes)).table.tolist() == expected


def record(changes: list[Change], optimizers: int, now: list[float]) -> tuple[list[list[int]], Tail, int]:
    """Return the counters after each batch, the tail, and how many of the batches have a row."""
    progress = Progress(_since=0.0)
    facts: dict[str, Any] = {"progress": progress, "window": 0, "optimizers": dict.fromkeys(range(optimizers))}
    run = SimpleNamespace(**facts, engine=SimpleNamespace(world_size=1))
    recorder, block, tail = Recorder("."), OpenBlock(cast("Run", run)), Tail(None)
    block.offset = 0.0
    tail.begin("a1", 1, Counters(), 0.0)
    block.begin(tail, 0)
    block.stop, recorder._block = FIRST_ROW, block
    expected, hundredths = [], 0
    for change in changes:
        hundredths += change.hundredths
        now[0] = (hundredths + 0.5) / 100
        progress.steps += change.steps
        progress.skipped_steps += change.skipped_steps
        progress.skipped_batches += change.skipped_batches
        progress.samples += change.samples
        progress.tokens += change.tokens
        progress.batch += 1 + change.missed
        # A step of the only optimizer leaves no window.
        run.window = 0 if change.steps and optimizers == 1 else change.window
        recorder.count(cast("Run", run), BatchEnd())
        expected.append([
            hundredths, progress.steps, progress.skipped_steps, progress.skipped_batches, progress.samples, run.window,
            progress.tokens, progress.batch,
        ])  # fmt: skip
    return expected, tail, tail.buffer[BEGIN:FIRST_ROW].count(HAS_ROW)


def test_a_regular_batch_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(open_block, "monotonic", lambda: now[0])
    monkeypatch.setattr("heliograph.builtin_callbacks.recorder.plugin.monotonic", lambda: now[0])
    _, tail, rows = record([REGULAR, *[REGULAR._replace(hundredths=3)] * 50, *[REGULAR] * 49], 1, now)
    assert rows == 1
    assert not any(tail.buffer[FIRST_ROW + ROW.size : NOTES])


def test_what_happens_in_an_open_block_is_no_write_to_the_file(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Looks(h.Plugin):
        @h.on(h.BatchEnd, lane=h.Lane.REPORT)
        def look(self, run: h.Run, event: h.BatchEnd) -> None:
            assert run.recording is not None
            sizes.append(run.recording.stat().st_size)
            logs = [each for each in read(run.recording).attempts[0].entries if isinstance(each, EventEntry)]
            assert [each.counters.steps for each in logs if each.event == "log"] == [*range(1, run.progress.steps)]

    fit([h.LogSchedule(h.Every(steps=1)), Recorder(tmp_path), Looks()], batches=20, epochs=1, validation=None)
    assert len(set(sizes)) == 1


def test_a_tail_without_room_for_notes_is_emptied_into_the_file(tmp_path: Path) -> None:
    """Nothing is lost or there twice, while it runs and at the end."""
    seen: list[int] = []

    class Looks(h.Plugin):
        @h.on(h.BatchEnd, lane=h.Lane.REPORT)
        def look(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.steps % 50 == 0:
                assert run.recording is not None
                seen.append(logs(run.recording))
                assert tail_path(run.recording).exists()

    result, _ = fit(
        [h.LogSchedule(h.Every(steps=1)), Recorder(tmp_path), Looks()], batches=400, epochs=1, validation=None
    )
    assert result.recording is not None
    assert seen == [step - 1 for step in range(50, 401, 50)]
    assert logs(result.recording) == 400


def logs(path: Path) -> int:
    """Return how many logs a recording has, each of which comes after its batch."""
    (attempt,) = read(path).attempts
    assert not attempt.damage
    batch, count = 0, 0
    for entry in attempt.entries:
        if isinstance(entry, Batches):
            batch = entry.last.batch
        elif isinstance(entry, EventEntry) and entry.event == "log":
            count += 1
            assert entry.counters.batch == batch == count
    return count
