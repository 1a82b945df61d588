"""A bounded queue, and the thread that writes what is in it: nothing that a tracker waits for holds up the training."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from functools import partial
from itertools import islice
from threading import Condition, Thread
from time import monotonic
from typing import Any, Final

from ...events.errors import describe_error
from .records import Record

MEMORY: Final = 256 * 2**20  # bytes that wait at most
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
        former: the thread of the outbox before, which may still be in a request; this one's waits for its end.

    Attributes:
        opened: what `write` returned for `open`.
        refused: the error by which no page could be opened: nothing is written then.
        lost: how many records were not written: for each reason, by kind.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Record], Any],
        *,
        outages: tuple[type[Exception], ...],
        capacity: int,
        patience: float,
        settles: float = 0.0,
        collects: Collection[str] = (),
        flush: Callable[[], None] = lambda: None,
        former: Thread | None = None,
    ) -> None:
        self._name, self._write, self._outages, self._former = name, write, outages, former
        self._capacity, self._patience = capacity, patience
        self._collects, self._flush = collects, flush
        self._queue: deque[Record] = deque()
        self._collected = self._values = 0  # the first of the queue, and what they bring: not flushed yet
        self._suspects = 0  # the first of the queue: of a batch that was refused
        self._settles, self._settling = settles, deque[tuple[float, Record]]()  # when each was written
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_closing = False
        self._bytes = self._written = 0
        self._outage = self._refusal = self._given_up = ""  # the error that lasts, the first refusal, the reason
        self.opened: Any = None
        self.refused = ""
        self.lost: dict[str, Counter[str]] = {}

    def put(self, record: Record) -> None:
        """Add a record, or drop it where too many wait."""
        with self._changed:
            if self._given_up:
                self._lose(record, self._given_up)
                return
            is_full = len(self._queue) >= self._capacity or self._bytes + record.size > MEMORY
            if is_full and record.kind not in ALWAYS:
                self._lose(record, f"more than {self._capacity} records, or {MEMORY // 2**20} MB, waited")
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
            while self._queue and not self._outage and self._waits_for_progress(DRAIN_PATIENCE):
                pass

    def close(self) -> Thread | None:
        """Wait until everything is written, or nothing is any more, and drop the rest.

        Returns:
            The thread, where it does not return from what it is writing.
        """
        with self._changed:
            if self._thread is None:
                return None
            self._is_closing = True
            self._changed.notify_all()
            while self._queue and self._waits_for_progress(self._patience, through_outages=True):
                pass
            is_done = not self._queue
            if not is_done:
                self._give_up(self._outage or f"nothing was written for {self._patience:g} seconds")
        if is_done:
            self._thread.join()
        return None if is_done else self._thread

    def _waits_for_progress(self, patience: float, through_outages: bool = False) -> bool:
        """Wait until a record is written, or an outage begins; return whether something was written in time."""
        before = self._written
        self._changed.wait_for(
            lambda: not self._queue or self._written > before or (bool(self._outage) and not through_outages), patience
        )
        return self._written > before

    def _settle(self) -> None:
        while self._settling and self._settling[0][0] < monotonic() - self._settles:
            self._settling.popleft()

    # In the thread.

    def _run(self) -> None:
        if self._former is not None:
            self._former.join()
        pause = FIRST_PAUSE
        try:
            while (work := self._next()) is not None:
                try:
                    work()
                except self._outages as error:
                    pause = self._wait(describe_error(error), pause)
                else:
                    pause = FIRST_PAUSE
                    if self._outage:
                        with self._changed:
                            self._outage = ""
                        logger.info("%s is written to again", self._name)
        except BaseException as error:
            with self._changed:
                self._give_up(describe_error(error))
            raise

    def _next(self) -> Callable[[], None] | None:
        """Wait until there is something to do, and return it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            count = self._collected
            record = self._queue[count] if len(self._queue) > count else None
            if count > 0 and not (record is not None and self._joins(record)):
                return partial(self._write_collected, list(islice(self._queue, count)))
            return None if record is None else partial(self._write_record, record)

    def _joins(self, record: Record) -> bool:
        """Return whether a record may be collected with those before it."""
        fits = self._values + record.values <= BATCH
        return fits and record.kind in self._collects and not self._suspects and not self._outage

    def _write_record(self, record: Record) -> None:
        is_collected = False
        try:
            if not self.refused:
                result = self._write(record)
                is_collected = record.kind in self._collects
                if record.kind == "open":
                    self.opened = result
        except self._outages:
            raise
        except Exception as error:  # noqa: BLE001  # counted, logged, and said in the result
            self._note_refusal(record, describe_error(error))
        if is_collected:
            with self._changed:
                if not self._given_up:
                    self._collected += 1
                    self._values += record.values
                    self._written += 1
                    self._changed.notify_all()
        else:
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
            self._note_refusal(records[0], describe_error(error))
        for record in records:
            self._remove(record, 0)
        self._forget_collected()

    def _forget_collected(self) -> None:
        with self._changed:
            self._collected = self._values = 0
            self._written += 1
            self._changed.notify_all()

    def _remove(self, record: Record, index: int) -> None:
        with self._changed:
            if self._given_up:  # dropped while it was written
                return
            del self._queue[index]
            self._bytes -= record.size
            self._suspects = max(0, self._suspects - 1)
            self._written += 1
            if self.refused and record.kind != "open":
                self._lose(record, self.refused)
            elif self._settles and record.kind in ROWS:
                self._settling.append((monotonic(), record))
                self._settle()
            self._changed.notify_all()

    def _wait(self, error: str, pause: float) -> float:
        """Wait before the next attempt; return the pause after that."""
        if not self._outage:
            logger.warning("%s cannot be written to: its records wait, the training continues (%s)", self._name, error)
        with self._changed:
            self._outage, was_closing = error, self._is_closing
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._given_up or self._is_closing is not was_closing, pause)
        return FIRST_PAUSE if self._is_closing else min(2 * pause, LONGEST_PAUSE)

    # What was lost.

    def _note_refusal(self, record: Record, error: str) -> None:
        with self._changed:
            if self._given_up:  # counted already
                return
            is_first, self._refusal = not self._refusal, self._refusal or error
            if record.kind == "open":
                self.refused = error
            self._lose(record, self._refusal)
        if is_first:
            logger.warning("%s did not write a record (%s): %s", self._name, record.kind, error)

    def _give_up(self, reason: str) -> None:
        """Drop what waits; with the lock."""
        if not self._given_up:
            self._given_up = reason
            for record in self._queue:
                self._lose(record, reason)
            self._queue.clear()
            self._collected = self._values = 0
            self._changed.notify_all()

    def _lose(self, record: Record, reason: str) -> None:
        self.lost.setdefault(reason, Counter())[record.kind] += 1
