"""Record one attempt: its events, requests and batches become lines, which are written together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from heliograph import Progress, Run
from torch import Tensor

from .attempt_facts import attempt_of
from .format.checksum import seal, to_json
from .format.digests import DigestBlock
from .format.lines import Items, attempt_items, counter_values, event_items, items_of, mark_items
from .format.records import Counters
from .format.tail import BEGIN, FIRST_ROW, Tail, tail_path
from .format.writer import Writer
from .handler_times import HandlerTimer
from .losses import copy_loss, read_losses
from .open_block import OpenBlock
from .requests import RequestTracker

BLOCK_STAYS_OPEN = {"log", "save_point", "checkpoint_saved", "checkpoint_pruned", "resume_verified"}
FIRST_TIMES, TIMES_EVERY = 1.0, 10.0  # seconds


class AttemptRecorder:
    """The recording of the attempt that is running.

    Args:
        run: the run.
        sample: one batch in `sample` is timed, after the first ones.
        losses: whether those of every batch are recorded.

    Attributes:
        block: the batches that are not in a line yet; it keeps the clock.
        progress: of the run.
        attempt: the attempt without entries.
        path: the file, None until it is known.
        timer: times the handlers.
        writer: of the file, None if it is not open.
    """

    def __init__(self, run: Run, sample: int, *, losses: bool) -> None:
        self.block, self.progress = OpenBlock(run), run.progress
        self.attempt = attempt_of(run, losses=losses)
        self.path: Path | None = None
        self._history = run.control.history
        self.requests, self.timer = RequestTracker(self._history), HandlerTimer(run.bus, sample)
        self.writer: Writer | None = None
        self._losses: list[Tensor | None] | None = [] if losses else None
        self._tail = Tail(None)
        self._is_fast = False
        self._began, self._times_due = monotonic(), FIRST_TIMES
        self._batches, self._number, self._marked, self._stop = 0, 1, BEGIN, 0
        self._lines: list[str] = []  # without checksums
        self._noted: list[str] = []  # those that are in the tail
        self._later_lines: list[str] | None = None
        self._begun_event: tuple[str, float, Sequence[float], list[int] | None] = "", 0.0, (), None
        self._last: Sequence[float] = ()  # counters
        self._error: OSError | None = None

    # The clock.

    @property
    def clock(self) -> float:
        return monotonic() - self._began

    def stop_clock(self) -> None:
        self.block.set_clock()
        self.block.due = 0.0  # the next batch is later than this event

    def handle_load(self) -> None:
        self.end_block()
        self.add_requests()
        self.requests.drop_pending()
        self.block.offset = self.progress.own_seconds - monotonic()

    # Entries.

    def add_event(self, event: str, data: Mapping[str, Any], *, sets_clock: bool = True) -> None:
        self._prepare_event(event)
        if sets_clock:
            self.stop_clock()
        self._last = counter_values(self.progress)
        served = self.requests.pop_served(event, data)
        self._add(event_items(event, self.clock, self._last, data if served is None else {**data, "asked": served}))

    def _add(self, items: Items) -> None:
        (self._lines if self._later_lines is None else self._later_lines).append(to_json(items))

    def begin_event(self, event: str) -> None:
        self._prepare_event(event)
        self.stop_clock()
        self._last = counter_values(self.progress)
        self._later_lines = []
        self._begun_event = event, self.clock, self._last, self.requests.pop_served(event, {})

    def finish_event(self, data: Mapping[str, Any]) -> None:
        later, self._later_lines = self._later_lines, None
        event, clock, counters, served = self._begun_event
        data = data if served is None else {**data, "asked": served}
        self._lines.append(to_json(event_items(event, clock, counters, data)))
        self._lines += later or ()

    def _prepare_event(self, event: str) -> None:
        if event not in BLOCK_STAYS_OPEN or self._losses is not None:
            self.end_block()
        self.add_requests()

    def _check_next(self) -> None:
        self.block.stop = 0

    def add_requests(self) -> None:
        if self.block.at > self._marked:
            self._marked = self.block.at
            self._lines.append(to_json(mark_items(self._number, self.block.last_batch)))
        for entry in self.requests.new_entries():
            self._add(items_of(entry))
        self.block.stop = self._stop

    def add_digests(self, block: DigestBlock) -> None:
        self._add(items_of(block))

    def add_times(self, *, now: bool = False) -> None:
        if now or self.clock > self._times_due:
            self._times_due = self.clock + TIMES_EVERY
            self._add(items_of(self.timer.times(self.batches)))

    # Batches.

    @property
    def batches(self) -> int:
        return self._batches + self.block.batches

    def add_batch(self, run: Run) -> None:
        block = self.block
        if block.is_full:
            self.end_block()
        if self._history.total != self.requests.seen:
            self.add_requests()
        batches = self.batches
        if self.timer.is_on or batches >= self.timer.due:
            self.timer.step(batches)
        try:
            self.write()
        except OSError as error:
            self._error = error
        self._begin_block()
        if self._losses is not None:
            self._losses[block.batches :] = [copy_loss(run.loss)]  # instead of that of a batch that was interrupted
        try:
            block.add(run)
        except OSError as error:
            self._error = error
        free = self.timer.due - batches - 1 if self._is_fast and not self.timer.is_on else 0
        self._stop = block.stop = min(block.at + free, FIRST_ROW)

    def end_block(self) -> None:
        block, losses = self.block, self._losses
        self._stop = block.stop = 0
        if not block.batches:
            block.at = 0
            return
        rows = block.tail.rows(block.at)
        known = None if losses is None else read_losses(losses[: len(rows.table)], rows.skips)
        lines, last, batches = list(map(to_json, rows.arrays(known))), counter_values(rows.last), self.batches
        # At once and last, so that a Ctrl-C at any line leaves the open block or its lines.
        self._lines, self._last, self._batches, self._number, self._losses, self._marked, block.at = (
            [*self._lines, *lines], last, batches, self._number + 1, None if losses is None else [], BEGIN, 0,
        )  # fmt: skip

    def _begin_block(self) -> None:
        if self.block.at:
            return
        assert self.writer is not None
        tail = self._tail if not self.writer.is_failing else Tail(None)  # the file's keeps unwritten rows
        progress = self.progress
        first = replace(
            Counters(*self._last),  # type: ignore[arg-type]  # all but the seconds are whole numbers
            epoch=progress.epoch,
            batch=progress.batch - 1,
            earlier_batches=progress.earlier_batches,
            validations=progress.validations,
            evaluated=progress.evaluated,
        )
        clock = max(0.0, first.seconds - self.block.offset - self._began)  # the attempt's at the run's last time
        try:
            tail.begin(self.attempt.name, self._number, first, clock)
        except OSError as error:
            self._error = error
        self.block.begin(tail, first.samples)  # last: a Ctrl-C before it leaves none, and the tail is begun again

    # The file.

    def open(self, writer: Writer) -> None:
        if self.path != writer.path:
            self._lines.insert(0, to_json(attempt_items(self.attempt)))
        self.writer, self.path, self._tail = writer, writer.path, Tail(tail_path(writer.path))
        self._history.watcher = self._check_next
        self._is_fast = self.block.is_single and self._losses is None and self._tail.obstacle is None

    def write(self) -> None:
        if self.writer is not None and (self._lines or self.writer.is_failing):
            if self._lines and self.block.at and self.block.tail.note(self._lines):
                self._noted += self._lines
                self._lines = []
            else:
                self._hand_over(self.writer)
                self.writer.write()
                if not self.writer.is_failing:
                    self._tail.clear_notes()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _hand_over(self, writer: Writer) -> None:
        writer.add(map(seal, [*self._noted, *self._lines]))  # first: a Ctrl-C within it loses none
        self._noted, self._lines = [], []

    def close(self) -> None:
        self.timer.detach()
        self._history.watcher = None
        self.requests.detach()
        self.block.release_clock()
        self.end_block()
        self.add_requests()
        writer, self.writer = self.writer, None
        if writer is None:
            return
        self._hand_over(writer)
        try:
            writer.close()
        except OSError:
            self._tail.close(remove=False)  # readers find the last batches there
            raise
        self._tail.close()


def counters_of(progress: Progress) -> Counters:
    return Counters(
        progress.epoch, progress.batch, progress.earlier_batches, progress.steps, progress.skipped_steps,
        progress.skipped_batches, progress.samples, progress.validations, progress.evaluated, progress.seconds,
        progress.tokens,
    )  # fmt: skip
