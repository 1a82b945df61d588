"""One attempt while it is recorded: what came about becomes lines, and lines are written together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from ...events import Progress, Run
from . import losses as readings
from .attempt_facts import attempt_of
from .format.lines import encode, encode_attempt, encode_mark
from .format.records import Counters, Entry, EventEntry
from .format.tail import BATCH, BEGIN, ROW, SIZE, Tail, tail_path
from .format.writer import Writer
from .handler_times import Timing
from .requests import Asking

AMID = {"log", "save_point", "checkpoint_saved", "checkpoint_pruned", "resume_verified"}  # a block goes on behind them
SPENT_FIRST, SPENT_EVERY = 1.0, 10.0  # seconds


class Session:
    """What is known of the attempt that goes on.

    Of the batches behind the last line, each has a row in the tail. The attributes are for the handler of every batch,
    which has no time to ask methods.

    Args:
        run: the run.
        sample: of the events of every batch, one batch in so many is timed.
        losses: whether those of every batch are recorded.

    Attributes:
        at: where the next row belongs in `buffer`, 0 where no block is open.
        alarm: the row at which there is more to do than to pack it.
        due: the time at which the run's clock is to be set again.
        hundredths: the run's clock, in hundredths of a second.
        offset: what a monotonic clock lacks to the run's.
        buffer: where rows are packed.
        attempt: what is told of it when it begins.
        path: the file that it is told in, None while nobody knows which it is to be.
        timing: the clocks of the handlers.
        writer: the open file, None without.
    """

    def __init__(self, run: Run, sample: int, *, losses: bool) -> None:
        # First what is read for every batch, so that it lies together.
        self.at = self.alarm = self.hundredths = 0
        self.due = 0.0
        self.progress = run.progress
        self.offset = self.progress.own_seconds - monotonic()
        self.buffer: Any = None
        self.attempt = attempt_of(run, losses=losses)
        self.path: Path | None = None
        self._history = run.control.history
        self.asking, self.timing = Asking(self._history), Timing(run.bus, sample)
        self.writer: Writer | None = None
        self._is_alone = run.engine.world_size == 1
        self._losses: list[Tensor | None] | None = [] if losses else None
        self._tail = self._open_tail = Tail(None)
        self._is_plain = False
        self._began, self._spent_due = monotonic(), SPENT_FIRST
        self._batches, self._number, self._marked = 0, 1, 0
        self._lines: list[str] = []
        self._held: list[str] | None = None
        self._head: tuple[str, float, Counters, list[int] | None] = "", 0.0, Counters(), None
        self._known = Counters()
        self._untold: OSError | None = None

    # The clock.

    @property
    def clock(self) -> float:
        """Seconds since the attempt began."""
        return monotonic() - self._began

    def place(self) -> Counters:
        """Let the run's clock stand, so that all who hear of this moment read one time; return where the run is."""
        if self._is_alone:
            self.tick()
        return counters_of(self.progress)

    def tick(self) -> None:
        """Let the run's clock stand at this moment, rounded down to hundredths of a second."""
        self.hundredths = int((monotonic() + self.offset) * 100)
        self.due = (self.hundredths + 1) / 100 - self.offset
        self.progress.set_seconds(self.hundredths / 100)

    def release_clock(self) -> None:
        """Let the run's clock go on."""
        if self._is_alone:
            self.progress.set_seconds(self.progress.own_seconds)
            self.progress.load_state_dict(self.progress.state_dict())

    def turn_back(self) -> None:
        """Go on from another state: what stood is dropped, and the clock set anew."""
        self.end_block()
        self.catch_up()
        self.asking.turn_back()
        self.offset = self.progress.own_seconds - monotonic()

    # Entries.

    def happened(self, event: str, data: Mapping[str, Any], *, ticks: bool = True) -> None:
        """Take an event in, behind the batches and the requests before it.

        Args:
            event: its name.
            data: its fields.
            ticks: whether the run's clock is set; not for an event that may come amid others, which would then have
                been told at two times.
        """
        if event not in AMID or self._losses is not None:  # what a resume goes on from, a kill must not lose
            self.end_block()
        self.catch_up()
        self._known = self.place() if ticks else counters_of(self.progress)
        asked = self.asking.served_by(event)
        self.add(EventEntry(event, self.clock, self._known, data if asked is None else {**data, "asked": asked}))

    def add(self, entry: Entry) -> None:
        """Take an entry in; while an event is held open, behind it."""
        (self._lines if self._held is None else self._held).append(encode(entry))

    def hold(self, event: str) -> None:
        """Keep what comes from now on behind an event whose data are still to come."""
        if event not in AMID or self._losses is not None:  # what a resume goes on from, a kill must not lose
            self.end_block()
        self.catch_up()
        self._known = self.place()
        self._held = []
        self._head = event, self.clock, self._known, self.asking.served_by(event)

    def let_go(self, data: Mapping[str, Any]) -> None:
        """Take in the event, then what was held."""
        held, self._held = self._held, None
        event, clock, place, asked = self._head
        self.add(EventEntry(event, clock, place, data if asked is None else {**data, "asked": asked}))
        self._lines += held or ()

    def _hear(self) -> None:
        """Look up at the next batch: something is asked."""
        self.alarm = self.at

    def catch_up(self) -> None:
        """Mark behind which batch of the open block the next lines belong, then take in the requests."""
        if self.at > self._marked:
            self._marked = self.at
            self._lines.append(encode_mark(self._number, self._last_batch))
        for entry in self.asking.news():
            self.add(entry)

    def add_spent(self, *, now: bool = False) -> None:
        """Take in the times of the handlers, every now and then."""
        if now or self.clock > self._spent_due:
            self._spent_due = self.clock + SPENT_EVERY
            self.add(self.timing.spent(self.batches))

    # Batches.

    @property
    def batches(self) -> int:
        """How many batches were heard of."""
        return self._batches + (self.at - BEGIN) // ROW.size if self.at else self._batches

    @property
    def _last_batch(self) -> int:
        """The number within the epoch of the last batch that has a row."""
        batch: int = ROW.unpack_from(self.buffer, self.at - ROW.size)[BATCH]
        return batch

    def count(self, run: Run) -> None:
        """Keep the counters of a batch where there is more to do than that; an error waits for the next event."""
        if self.at == SIZE:
            self.end_block()
        if self._history.total != self.asking.told:
            self.catch_up()
        batches = self.batches
        if self.timing.is_on or batches >= self.timing.due:
            self.timing.step(batches)
        try:
            self.send()
        except OSError as error:
            self._untold = error
        self._begin_block()
        self._pack(run)
        wait = 1 if self.timing.is_on or not self._is_plain else self.timing.due - batches
        self.alarm = min(self.at + (wait - 1) * ROW.size, SIZE)

    def _pack(self, run: Run) -> None:
        """Keep a row, and what plain rows need not."""
        progress, at = self.progress, self.at
        if self._is_alone:
            self.tick()
            hundredths = self.hundredths
        else:
            hundredths = int(round(progress.seconds * 100, 6))
        ROW.pack_into(
            self.buffer, at, hundredths, progress.steps, progress.skipped_steps, progress.skipped_batches,
            progress.samples, run.window, progress.batch,
        )  # fmt: skip
        self.at = at + ROW.size
        if self._losses is not None:
            self._losses.append(readings.kept(run.loss))
        try:
            self._open_tail.keep(at)
        except OSError as error:
            self._untold = error

    def end_block(self) -> None:
        """Make lines of the rows."""
        rows = self._open_tail.rows(self.at) if self.at > BEGIN else None
        self._batches = self.batches
        if self.at:
            self._open_tail.filled = self.at
        self.at = self.alarm = self._marked = 0
        if rows is None:
            return
        values = None if self._losses is None else readings.read(self._losses, rows.skips)
        lines = rows.lines(values)
        self._lines += lines
        self._number += 1
        self._known = rows.last
        if self._losses is not None:
            self._losses.clear()

    def _begin_block(self) -> None:
        if self.at:
            return
        assert self.writer is not None
        self._open_tail = self._tail if not self.writer.is_failing else Tail(None)  # which keeps what waits for room
        self.buffer = self._open_tail.buffer
        progress = self.progress
        self.at = self._marked = BEGIN
        first = replace(
            self._known,
            epoch=progress.epoch,
            batch=progress.batch - 1,
            earlier_batches=progress.earlier_batches,
            validations=progress.validations,
            evaluated=progress.evaluated,
        )
        clock = max(0.0, first.seconds - self.offset - self._began)  # the one stands still, the other goes on
        try:
            self._open_tail.begin(self.attempt.name, self._number, first, clock)
        except OSError as error:
            self._untold = error

    # The file.

    def open(self, writer: Writer) -> None:
        """Write to a file from now on."""
        if self.path != writer.path:
            self._lines.insert(0, encode_attempt(self.attempt))
        self.writer, self.path, self._tail = writer, writer.path, Tail(tail_path(writer.path))
        self._history.watcher = self._hear
        self._is_plain = self._is_alone and self._losses is None and self._tail.obstacle is None

    def send(self) -> None:
        """Write the lines.

        Raises:
            OSError: some could not be written; not raised again until some could.
        """
        if self.writer is not None:
            lines, self._lines = self._lines, []
            self.writer.write(lines)
        error, self._untold = self._untold, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Write what there is, and let go of the file; another one may be opened.

        Raises:
            OSError: something could not be written.
        """
        self.timing.detach()
        self._history.watcher = None
        self.release_clock()
        self.end_block()
        self.catch_up()
        writer, self.writer = self.writer, None
        if writer is None:
            return
        lines, self._lines = self._lines, []
        try:
            writer.close(lines)
        except OSError:
            self._tail.close(remove=False)  # the last batches are to be read there
            raise
        self._tail.close()


def counters_of(progress: Progress) -> Counters:
    """Return a run's counters."""
    return Counters(
        progress.epoch, progress.batch, progress.earlier_batches, progress.steps, progress.skipped_steps,
        progress.skipped_batches, progress.samples, progress.validations, progress.evaluated, progress.seconds,
    )  # fmt: skip
