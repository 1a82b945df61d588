"""Whatever the counters do from batch to batch, the open block has them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from itertools import count
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, cast

import heliograph as h
import pytest
from heliograph.events import BatchEnd, Progress, Run
from heliograph.packages.recorder.tests.recordings import fit
from heliograph.tests import kit
from heliograph_recorder import attempt_recorder
from heliograph_recorder.attempt_recorder import WIDTH, AttemptRecorder, OpenBlock
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import Batches, EventEntry
from heliograph_recorder.format.writer import RecordingWriter
from heliograph_recorder.plugin import Recorder
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


REGULAR = Change(0, 1, 0, 0, 8, 0, 0)
OTHER = st.builds(
    Change, st.sampled_from([0, 1, 253, 254, 9_999]), *[st.integers(0, 2)] * 3, st.sampled_from([0, 3, 8]),
    *[st.integers(0, 2)] * 2,
)  # fmt: skip
CHANGES = st.lists(st.one_of(st.just(REGULAR), st.just(REGULAR._replace(hundredths=2)), OTHER), min_size=1, max_size=40)


@given(CHANGES, st.integers(1, 2))
def test_the_block_has_the_counters_of_every_batch(changes: list[Change], optimizers: int) -> None:
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempt_recorder, "monotonic", lambda: now[0])
        recording = Recording(optimizers, now)
        for change in changes:
            recording.add(change)
    assert recording.rows() == recording.expected


class Recording:
    """Batches that a recorder counts in an open block, and what the block should have.

    Args:
        optimizers: how many the run has.
        now: the time, in a list.
    """

    def __init__(self, optimizers: int, now: list[float]) -> None:
        self.progress, self.hundredths, self.now = Progress(_since=0.0), 0, now
        facts: dict[str, Any] = {"progress": self.progress, "optimizers": dict.fromkeys(range(optimizers))}
        self.run = SimpleNamespace(**facts, engine=SimpleNamespace(world_size=1), stepping=SimpleNamespace(window=0))
        self.block, self.expected = OpenBlock(cast("Run", self.run)), list[list[int]]()
        self.block.offset = 0.0
        self.block.stop = self.block.due = sys.maxsize
        self.recorder = Recorder(".")
        self.recorder._block = self.block

    def add(self, change: Change) -> None:
        """Count a batch."""
        progress = self.progress
        self.hundredths += change.hundredths
        self.now[0] = (self.hundredths + 0.5) / 100
        progress.steps += change.steps
        progress.skipped_steps += change.skipped_steps
        progress.skipped_batches += change.skipped_batches
        progress.samples += change.samples
        progress.tokens += change.tokens
        progress.batch += 1
        # A step of the only optimizer leaves no window.
        self.run.stepping.window = 0 if change.steps and len(self.run.optimizers) == 1 else change.window
        self.expected.append([
            self.hundredths, progress.steps, progress.skipped_steps, progress.skipped_batches,
            progress.samples, self.run.stepping.window, progress.tokens,
        ])  # fmt: skip
        self.recorder.count(cast("Run", self.run), BatchEnd())

    def rows(self) -> list[list[int]]:
        """Return the rows of the block."""
        values = self.block.values.tolist()
        return [values[begin : begin + WIDTH] for begin in range(0, len(values), WIDTH)]


INTERRUPTED = {
    "first": ([], REGULAR),
    "mark": ([REGULAR] * 3, REGULAR._replace(hundredths=2)),
    "row": ([REGULAR] * 3, REGULAR._replace(hundredths=2, tokens=5)),
    "row after a pause": ([REGULAR] * 3, REGULAR._replace(hundredths=999)),
    "row after a row": ([REGULAR, REGULAR._replace(samples=3)], REGULAR._replace(samples=5)),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_ctrl_c_at_any_line_leaves_the_batch_out_or_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are recorded as they are, also if later batches follow."""
    now = [0.0]
    monkeypatch.setattr(attempt_recorder, "monotonic", lambda: now[0])
    before, interrupted = INTERRUPTED[name]
    outcomes = []
    for line in count(1):
        recording = Recording(1, now)
        for change in before:
            recording.add(change)
        was_interrupted = interrupt(recording, interrupted, line)
        if not was_interrupted:
            break
        rows, expected = recording.rows(), recording.expected
        has_it = len(rows) == len(expected)
        outcomes.append(has_it)
        assert rows == expected[: len(rows)]
        for change in (REGULAR, REGULAR._replace(hundredths=3), REGULAR._replace(tokens=1), REGULAR):
            recording.add(change)
        if not has_it:
            del expected[len(before)]
        assert recording.rows() == expected
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def interrupt(recording: Recording, change: Change, line: int) -> bool:
    """Interrupt the so-many-th line of what adds a batch; return whether it has so many."""
    return interrupt_at(line, lambda: recording.add(change), {attempt_recorder.__file__})


def interrupt_at(number: int, work: Callable[[], object], files: Container[str]) -> bool:
    """Interrupt the so-many-th line, call or return in some files; return whether there are so many."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        left -= event != "exception"
        if not left:
            raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(former)
    return False


@pytest.mark.parametrize("method", ["end_block", "_begin_block"])
@pytest.mark.parametrize("losses", [False, True])
def test_a_ctrl_c_while_a_block_ends_or_begins_loses_no_batch_and_doubles_none(
    method: str, losses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each batch one line, call or return further, until nothing is left to interrupt."""
    files = {str(each) for each in Path(attempt_recorder.__file__).parent.rglob("*.py")}
    ended, original = [False], getattr(AttemptRecorder, method)
    number = count(1)

    def interrupting(attempt: AttemptRecorder) -> None:
        if attempt.batches > 2:
            ended[0] = ended[0] or not interrupt_at(next(number), lambda: original(attempt), files)
        original(attempt)

    monkeypatch.setattr(AttemptRecorder, method, interrupting)

    class Ends(h.Plugin):
        @h.on(h.BatchEnd, lane=h.Lane.REPORT)
        def end(self, run: h.Run, event: h.BatchEnd) -> None:
            assert recorder._attempt is not None
            assert run.report.recording is not None
            recorder._attempt.end_block()
            if run.progress.steps % 25 == 0:
                recorder._attempt.write()
                assert batches_of(run.report.recording) == [*range(1, run.progress.steps + 1)]

    recorder, kept = Recorder(tmp_path, losses=losses), kit.Losses()
    result, _ = fit([recorder, kept, Ends()], batches=400, epochs=1, validation=None)
    assert ended[0]
    assert result.recording is not None
    assert batches_of(result.recording) == [*range(1, 401)]
    if losses:
        (attempt,) = read(result.recording).attempts
        blocks = [entry for entry in attempt.entries if isinstance(entry, Batches)]
        assert [loss for block in blocks for loss in block.losses or ()] == kept.values


def batches_of(path: Path) -> list[int]:
    """Return the numbers of the batches of a recording, which is not damaged."""
    (attempt,) = read(path).attempts
    assert not attempt.damage
    return [batch.counters.batch for entry in attempt.entries if isinstance(entry, Batches) for batch in entry]


@pytest.mark.parametrize("losses", [False, True])
def test_the_recording_of_an_interrupted_run_has_its_end(
    losses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = OpenBlock.add, [0]

    def interrupting(block: OpenBlock, run: Run) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        original(block, run)

    monkeypatch.setattr(OpenBlock, "add", interrupting)
    seconds = count()
    monkeypatch.setattr(attempt_recorder, "monotonic", lambda: next(seconds) / 50)
    accumulation = h.GradientAccumulation(2)
    with pytest.raises(KeyboardInterrupt):
        fit([Recorder(tmp_path, losses=losses), accumulation], batches=20, epochs=1, validation=None)
    (attempt,) = read(tmp_path).attempts
    assert not attempt.damage
    batches = [batch.counters.batch for entry in attempt.entries if isinstance(entry, Batches) for batch in entry]
    (failure,) = [each for each in attempt.entries if isinstance(each, EventEntry) and each.event == "run_failed"]
    assert batches == list(range(1, failure.counters.batch))
    assert len(batches) >= 2


def test_a_ctrl_c_before_lines_are_written_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = RecordingWriter.write, count(1)

    def interrupting(*arguments: Any) -> None:
        if next(calls) == 5:
            raise KeyboardInterrupt
        original(*arguments)

    monkeypatch.setattr(RecordingWriter, "write", interrupting)
    with pytest.raises(KeyboardInterrupt):
        fit([Recorder(tmp_path)], batches=2, epochs=3, validation=None)
    (attempt,) = read(tmp_path).attempts
    events = [each.event for each in attempt.entries if isinstance(each, EventEntry)]
    assert events == ["train_start", *["epoch_start", "epoch_end"] * 2, "run_failed", "run_closed"]
