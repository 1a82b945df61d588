"""Record one attempt: its events, requests and batches become lines, which are written together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from ...events import Progress, Run
from .attempt_facts import attempt_of
from .format.lines import encode, encode_attempt, encode_mark
from .format.records import Counters, Entry, EventEntry
from .format.tail import BATCH, BEGIN, ROW, SIZE, Tail, tail_path
from .format.writer import Writer
from .handler_times import HandlerTimer
from .losses import copy_loss, read_losses
from .requests import RequestTracker

BLOCK_STAYS_OPEN = {"log", "save_point", "checkpoint_saved", "checkpoint_pruned", "resume_verified"}
FIRST_TIMES, TIMES_EVERY = 1.0, 10.0  # seconds


class AttemptRecorder:
    """The recording of the attempt that is running.

    Each batch of the open block has a row in the tail. The handler of `BatchEnd` writes attributes directly, because
    calling methods for every batch would take too long.

    Args:
        run: the run.
        sample: one batch in `sample` is timed, after the first ones.
        losses: whether those of every batch are recorded.

    Attributes:
        at: the offset of the next row in `buffer`, 0 if no block is open.
        next_check: the offset at which `add_batch` has to be called.
        due: the monotonic time at which the run's clock has to be set again.
        hundredths: the run's clock, in hundredths of a second.
        offset: the run's clock minus the monotonic one.
        buffer: the rows.
        attempt: the attempt without entries.
        path: the file, None until it is known.
        timer: times the handlers.
        writer: of the file, None if it is not open.
    """

    def __init__(self, run: Run, sample: int, *, losses: bool) -> None:
        # What is read for every batch comes first, so that it is close together in memory.
        self.at = self.next_check = self.hundredths = 0
        self.due = 0.0
        self.progress = run.progress
        self.offset = self.progress.own_seconds - monotonic()
        self.buffer: Any = None
        self.attempt = attempt_of(run, losses=losses)
        self.path: Path | None = None
        self._history = run.control.history
        self.requests, self.timer = RequestTracker(self._history), HandlerTimer(run.bus, sample)
        self.writer: Writer | None = None
        self._is_single = run.engine.world_size == 1
        self._losses: list[Tensor | None] | None = [] if losses else None
        self._tail = self._open_tail = Tail(None)
        self._is_fast = False
        self._began, self._times_due = monotonic(), FIRST_TIMES
        self._batches, self._number, self._marked = 0, 1, 0
        self._lines: list[str] = []
        self._later_lines: list[str] | None = None
        self._begun_event: tuple[str, float, Counters, list[int] | None] = "", 0.0, Counters(), None
        self._last = Counters()
        self._error: OSError | None = None

    # The clock.

    @property
    def clock(self) -> float:
        """Seconds since the attempt began."""
        return monotonic() - self._began

    def stop_clock(self) -> Counters:
        """Stop the run's clock at this moment, so that all handlers read the same time; return the counters."""
        if self._is_single:
            self.set_clock()
        return counters_of(self.progress)

    def set_clock(self) -> None:
        """Set the run's clock to this moment, rounded down to hundredths of a second."""
        self.hundredths = int((monotonic() + self.offset) * 100)
        self.due = (self.hundredths + 1) / 100 - self.offset
        self.progress.set_seconds(self.hundredths / 100)

    def release_clock(self) -> None:
        """Let the run's clock run again."""
        if self._is_single:
            self.progress.set_seconds(self.progress.own_seconds)
            self.progress.load_state_dict(self.progress.state_dict())

    def handle_load(self) -> None:
        """Continue from a loaded state: drop the pending requests and set the clock."""
        self.end_block()
        self.add_requests()
        self.requests.drop_pending()
        self.offset = self.progress.own_seconds - monotonic()

    # Entries.

    def add_event(self, event: str, data: Mapping[str, Any], *, sets_clock: bool = True) -> None:
        """Add an event, after the batches and requests before it.

        Args:
            event: its name.
            data: its fields.
            sets_clock: whether to set the run's clock; not for an event that may be emitted during another, whose later
                handlers would read another time.
        """
        self._prepare_event(event)
        self._last = self.stop_clock() if sets_clock else counters_of(self.progress)
        served = self.requests.pop_served(event)
        self.add_entry(EventEntry(event, self.clock, self._last, data if served is None else {**data, "asked": served}))

    def add_entry(self, entry: Entry) -> None:
        """Add an entry; if an event was begun, after it."""
        (self._lines if self._later_lines is None else self._later_lines).append(encode(entry))

    def begin_event(self, event: str) -> None:
        """Add an event whose data are not known yet; later entries come after it."""
        self._prepare_event(event)
        self._last = self.stop_clock()
        self._later_lines = []
        self._begun_event = event, self.clock, self._last, self.requests.pop_served(event)

    def finish_event(self, data: Mapping[str, Any]) -> None:
        """Add the data of the event that was begun."""
        later, self._later_lines = self._later_lines, None
        event, clock, counters, served = self._begun_event
        self.add_entry(EventEntry(event, clock, counters, data if served is None else {**data, "asked": served}))
        self._lines += later or ()

    def _prepare_event(self, event: str) -> None:
        """Add what came before an event; a block with losses ends, because a kill would lose them."""
        if event not in BLOCK_STAYS_OPEN or self._losses is not None:
            self.end_block()
        self.add_requests()

    def _check_next(self) -> None:
        """Call `add_batch` for the next batch: there is a new request."""
        self.next_check = self.at

    def add_requests(self) -> None:
        """Add the new requests, after a mark that says which batch of the open block they follow."""
        if self.at > self._marked:
            self._marked = self.at
            self._lines.append(encode_mark(self._number, self._last_batch))
        for entry in self.requests.new_entries():
            self.add_entry(entry)

    def add_times(self, *, now: bool = False) -> None:
        """Add the times of the handlers, if they are due."""
        if now or self.clock > self._times_due:
            self._times_due = self.clock + TIMES_EVERY
            self.add_entry(self.timer.times(self.batches))

    # Batches.

    @property
    def batches(self) -> int:
        """How many batches were recorded."""
        return self._batches + (self.at - BEGIN) // ROW.size if self.at else self._batches

    @property
    def _last_batch(self) -> int:
        """The number within the epoch of the last batch that has a row."""
        batch: int = ROW.unpack_from(self.buffer, self.at - ROW.size)[BATCH]
        return batch

    def add_batch(self, run: Run) -> None:
        """Add a batch, and do what is due; an error is raised at the next event."""
        if self.at == SIZE:
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
        self._add_row(run)
        rows = 1 if self.timer.is_on or not self._is_fast else self.timer.due - batches
        self.next_check = min(self.at + (rows - 1) * ROW.size, SIZE)

    def _add_row(self, run: Run) -> None:
        """Add a row, the loss and, without a mapping, the row to the file."""
        progress, at = self.progress, self.at
        if self._is_single:
            self.set_clock()
            hundredths = self.hundredths
        else:
            hundredths = int(round(progress.seconds * 100, 6))
        ROW.pack_into(
            self.buffer, at, hundredths, progress.steps, progress.skipped_steps, progress.skipped_batches,
            progress.samples, run.window, progress.tokens, progress.batch,
        )  # fmt: skip
        self.at = at + ROW.size
        if self._losses is not None:
            self._losses.append(copy_loss(run.loss))
        try:
            self._open_tail.write_row(at)
        except OSError as error:
            self._error = error

    def end_block(self) -> None:
        """Turn the rows into lines."""
        rows = self._open_tail.rows(self.at) if self.at > BEGIN else None
        self._batches = self.batches
        if self.at:
            self._open_tail.filled = self.at
        self.at = self.next_check = self._marked = 0
        if rows is None:
            return
        losses = None if self._losses is None else read_losses(self._losses, rows.skips)
        self._lines += rows.lines(losses)
        self._number += 1
        self._last = rows.last
        if self._losses is not None:
            self._losses.clear()

    def _begin_block(self) -> None:
        if self.at:
            return
        assert self.writer is not None
        self._open_tail = self._tail if not self.writer.is_failing else Tail(None)  # the file's keeps unwritten rows
        self.buffer = self._open_tail.buffer
        progress = self.progress
        self.at = self._marked = BEGIN
        first = replace(
            self._last,
            epoch=progress.epoch,
            batch=progress.batch - 1,
            earlier_batches=progress.earlier_batches,
            validations=progress.validations,
            evaluated=progress.evaluated,
        )
        clock = max(0.0, first.seconds - self.offset - self._began)  # the attempt's clock at the run's last time
        try:
            self._open_tail.begin(self.attempt.name, self._number, first, clock)
        except OSError as error:
            self._error = error

    # The file.

    def open(self, writer: Writer) -> None:
        """Write to a file from now on."""
        if self.path != writer.path:
            self._lines.insert(0, encode_attempt(self.attempt))
        self.writer, self.path, self._tail = writer, writer.path, Tail(tail_path(writer.path))
        self._history.watcher = self._check_next
        self._is_fast = self._is_single and self._losses is None and self._tail.obstacle is None

    def write(self) -> None:
        """Write the lines.

        Raises:
            OSError: some could not be written; not raised again until a write succeeds.
        """
        if self.writer is not None:
            lines, self._lines = self._lines, []
            self.writer.write(lines)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Write all lines, and close the file; another one may be opened.

        Raises:
            OSError: something could not be written.
        """
        self.timer.detach()
        self._history.watcher = None
        self.release_clock()
        self.end_block()
        self.add_requests()
        writer, self.writer = self.writer, None
        if writer is None:
            return
        lines, self._lines = self._lines, []
        try:
            writer.close(lines)
        except OSError:
            self._tail.close(remove=False)  # readers find the last batches there
            raise
        self._tail.close()


def counters_of(progress: Progress) -> Counters:
    """Return a run's counters."""
    return Counters(
        progress.epoch, progress.batch, progress.earlier_batches, progress.steps, progress.skipped_steps,
        progress.skipped_batches, progress.samples, progress.validations, progress.evaluated, progress.seconds,
        progress.tokens,
    )  # fmt: skip
