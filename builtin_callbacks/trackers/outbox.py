"""A bounded queue, and the thread that writes what is in it: nothing that a tracker waits for holds up the training."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from itertools import islice
from threading import Condition, Thread
from time import monotonic
from typing import Final

from ...events.errors import describe_error
from .records import Record

MEMORY: Final = 256 * 2**20  # bytes of arrays that wait at most
ALWAYS: Final = ("open", "roll_back", "finish")  # what is never dropped
BATCH: Final = 1000  # values that are collected at most before they are flushed
ROWS: Final = ("scalars", "text")  # what is kept until it is safe; hyper-parameters are written again with each page
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between two attempts to write the same
DRAIN_PATIENCE: Final = 1.0  # seconds; a save holds up the training

logger = logging.getLogger("heliograph")


class Outbox:
    """Writes records in their order, in a daemon thread that begins with the first of them.

    Args:
        name: whose it is, for messages.
        write: writes one record, or collects it for `flush`; called in the thread.
        outages: errors after which the same is tried again, after a pause that grows.
        capacity: how many records may wait; later ones are dropped.
        patience: seconds without progress after which `close` drops what still waits.
        settles: seconds after which what was written is safe where the process is killed.
        collects: kinds of records that `write` collects; they stay in the queue until `flush` has written them.
        flush: writes what was collected.

    Attributes:
        lost: how many records were not written, by kind.
        refused: the error by which no page could be opened: nothing is written then.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Record], None],
        outages: tuple[type[Exception], ...],
        capacity: int,
        patience: float,
        settles: float = 0.0,
        collects: Collection[str] = (),
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        self._name, self._write, self._outages = name, write, outages
        self._collects, self._flush = collects, flush
        self._capacity, self._patience = capacity, patience
        self._queue: deque[Record] = deque()
        self._collected = self._suspects = 0  # the first of the queue: not flushed yet; of a batch that was refused
        self._values = 0  # of those that are collected
        self._settles, self._settling = settles, deque[tuple[float, Record]]()  # when each was written
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_closing = self._is_given_up = False
        self._bytes = self._written = 0
        self._outage = self._first_error = ""
        self.lost: Counter[str] = Counter()
        self.refused = ""

    @property
    def error(self) -> str:
        """The first error that lost a record, or the last of an outage that has not ended; else empty."""
        return self._first_error or self._outage

    def put(self, record: Record) -> None:
        """Add a record, or drop it where too many wait."""
        with self._changed:
            is_full = len(self._queue) >= self._capacity or self._bytes + record.size > MEMORY
            if is_full and record.kind not in ALWAYS:
                self.lost[record.kind] += 1
                return
            self._queue.append(record)
            self._bytes += record.size
            if self._thread is None:
                self._thread = Thread(target=self._run, name=f"heliograph-{self._name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def waiting(self) -> list[Record]:
        """Return what is not written yet, the one that is being written included, or not safe yet."""
        with self._changed:
            self._settle()
            return [*(record for _, record in self._settling), *self._queue]

    def drain(self) -> None:
        """Wait until everything is written; not in an outage, nor longer than a second without progress."""
        with self._changed:
            self._wait_while_written(DRAIN_PATIENCE, lambda: bool(self._outage))

    def close(self) -> None:
        """Wait until everything is written, or nothing is any more, and drop the rest."""
        with self._changed:
            if self._thread is None:
                return
            self._is_closing = True
            self._changed.notify_all()
            self._wait_while_written(self._patience)
            is_done = not self._queue
            if not is_done and not self.error:
                self._outage = f"nothing was written for {self._patience:g} seconds"
            self._is_given_up = True
            self.lost.update(record.kind for record in self._queue)
            self._queue.clear()
            self._collected = self._values = 0
            self._changed.notify_all()
        if is_done:
            self._thread.join()
        self._thread = None

    def _settle(self) -> None:
        while self._settling and self._settling[0][0] < monotonic() - self._settles:
            self._settling.popleft()

    def _wait_while_written(self, patience: float, is_in_vain: Callable[[], bool] = lambda: False) -> None:
        while self._queue and not is_in_vain():
            before = self._written
            self._changed.wait_for(lambda: not self._queue or self._written > before or is_in_vain(), patience)  # noqa: B023
            if self._written == before:
                return

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while self._waits_for_work():
            try:
                self._work()
            except self._outages as error:
                pause = self._wait(describe_error(error), pause)
            else:
                pause = FIRST_PAUSE

    def _waits_for_work(self) -> bool:
        """Wait until there is something to write; return False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            return bool(self._queue)

    def _work(self) -> None:
        """Write the next record, or flush what was collected; an outage is raised, and the same is tried again."""
        with self._changed:
            count = self._collected
            record = self._queue[count] if len(self._queue) > count else None
            fits = record is not None and not self._suspects and self._values + record.values <= BATCH
            is_due = count > 0 and not (fits and record is not None and record.kind in self._collects)
            collected = list(islice(self._queue, count)) if is_due else []
        if collected:
            self._write_collected(collected)
        elif record is not None:
            self._write_record(record)

    def _write_record(self, record: Record) -> None:
        try:
            if not self.refused:
                self._write(record)
        except self._outages:
            raise
        except Exception as error:  # noqa: BLE001  # counted, logged, and said in the result
            self._note_loss(record, describe_error(error))
        else:
            if record.kind in self._collects and not self.refused:
                self._note_collected(record)
                return
        self._remove(record, self._collected)

    def _write_collected(self, records: list[Record]) -> None:
        """Flush; the records of a batch that is refused are written again one by one, so only bad ones are lost."""
        try:
            self._flush()
        except self._outages:
            raise
        except Exception as error:  # noqa: BLE001  # counted, logged, and said in the result
            if len(records) > 1:
                self._suspects = len(records)
                self._forget_collected()
                return
            self._note_loss(records[0], describe_error(error))
        self._suspects = max(0, self._suspects - len(records))
        for record in records:
            self._remove(record, 0)
        self._forget_collected()

    def _note_collected(self, record: Record) -> None:
        with self._changed:
            if not self._is_given_up:
                self._collected += 1
                self._values += record.values
                self._written += 1
                self._changed.notify_all()

    def _forget_collected(self) -> None:
        with self._changed:
            self._collected = self._values = 0
            self._written += 1
            self._changed.notify_all()

    def _wait(self, error: str, pause: float) -> float:
        """Wait before the next attempt; return the pause after that."""
        if not self._outage:
            logger.warning("%s cannot be written to: its records wait, the training continues (%s)", self._name, error)
        with self._changed:
            self._outage, was_closing = error, self._is_closing
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_given_up or self._is_closing > was_closing, pause)
        return FIRST_PAUSE if self._is_closing else min(2 * pause, LONGEST_PAUSE)

    def _note_loss(self, record: Record, error: str) -> None:
        if not self._first_error:
            logger.warning("%s did not write a record (%s): %s", self._name, record.kind, error)
            self._first_error = error
        if record.kind == "open":
            self.refused = error
        self.lost[record.kind] += 1

    def _remove(self, record: Record, index: int) -> None:
        with self._changed:
            if self._is_given_up:  # dropped while it was written
                return
            del self._queue[index]
            self._bytes -= record.size
            self._written += 1
            if self._settles and record.kind in ROWS:
                self._settling.append((monotonic(), record))
                self._settle()
            if self.refused and record.kind != "open":
                self.lost[record.kind] += 1
            elif self._outage and not self.refused:
                logger.info("%s is written to again", self._name)
                self._outage = ""
            self._changed.notify_all()
