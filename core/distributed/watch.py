"""The watch of each rank over the others: report a failure, notice one of another rank, end a process that hangs."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from traceback import walk_stack
from types import FrameType
from typing import Any
from uuid import uuid4

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ...events import Run
from ...events.checks import place_of
from ..system.errors import SEEN
from .collective_errors import is_broken_collective, is_late
from .failure import Failure

Waiting = Callable[[], tuple[str, float] | None]
Job = Callable[[], None]
FIRST, NOTED = "failure", "noted"  # keys in the store
ACKNOWLEDGED = 1.0  # seconds for the other ranks to read a failure before the store ends with its host
BOUND = 5.0  # maximum seconds that the main thread waits for this thread
logger = logging.getLogger("heliograph")
ANSWERS = 2.0  # seconds in which a live rank answers
FRAMES = 6  # functions named in a report
# not named: the same in every collective
BELOW = ("torch.", "heliograph.core.distributed.", "heliograph.core.engines.")


@dataclass(slots=True)
class Limits:
    """The limits of a watch; they may be changed at any time.

    Attributes:
        report_after: seconds in one collective after which the places of all ranks are logged, and again after twice
            that.
        grace: seconds that a run has to end after another rank has failed, before the process is ended; the time of
            writing a checkpoint is not counted.
    """

    report_after: float = 60.0
    grace: float = 30.0


class Watch:
    """The watch of one rank over its group; its thread communicates with the other ranks through the store.

    A wait in a collective of gloo cannot be interrupted from within. So a rank that fails announces it and then leaves
    the group, which breaks the collectives of the other ranks; the announcement explains their errors. The other ranks
    wait for a failed rank, from their next collective on:

    - If its code fails: until it has left the group, a fraction of a second.
    - If its process dies: the same, and 2 s for the roll call that shows which rank is gone.
    - If it hangs or is stopped: for the engine's `timeout`, and the same 2 s. Its process ends itself `limits.grace`
    later,
      after it has finished writing a checkpoint, unless it is stopped.

    When a wait gets long, the place of each rank is logged. While a collective waits, Python runs no signal handlers: a
    SIGTERM or Ctrl-C takes effect when it returns.

    Args:
        store: the store of this group's processes; the watch uses a clone.
        rank: this rank.
        world_size: the number of ranks.
        waiting: returns the name of the current collective of this thread and its start by `time.monotonic()`, or None.
        host: the rank whose process hosts the store; None if torchrun's agent does.
        limits: when waits are reported, and when the process is ended.
        interval: seconds between two polls of the store.
        abort: aborts the current collective of this thread, if the backend supports it (nccl).

    Attributes:
        notices: posted texts, by topic.
        place: returns the place of the run; None outside of a run.
        leaves: whether the main thread is ending its run.
        is_lost: whether the store is gone.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        waiting: Waiting,
        host: int | None = 0,
        limits: Limits | None = None,
        interval: float = 0.2,
        abort: Callable[[], None] | None = None,
    ) -> None:
        self._failure: Failure | None = None
        self.notices: dict[str, str] = {}
        self.place: Callable[[], str] | None = None
        self.leaves = self.is_lost = False
        self.limits = limits or Limits()
        clone: Store = store.clone()  # type: ignore[attr-defined]  # a client supports one thread at a time
        self._store = clone
        self._unread, self._newest = set[int](), 0  # the numbers of messages of all ranks
        self._rank, self._world_size, self._host = rank, world_size, host
        self._waiting, self._interval, self._abort = waiting, interval, abort
        self._watched, self._lock = threading.get_ident(), threading.Lock()
        self._writes = 0  # checkpoints being written, during which the process is not ended
        self._noted_at = self._grace_since = self._waits_since = 0.0
        self._next_report = math.inf
        self._reports = 0
        self._rolls: list[Roll] = []
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="heliograph-watch", daemon=True)
        self._thread.start()

    # For the main thread.

    def announce(self, error: BaseException, place: str) -> None:
        """Announce to all ranks that this one fails; only the first announcement counts.

        Args:
            error: the error.
            place: where in the run it occurred.
        """
        self.leaves = True
        failure = Failure.of(error, self._rank, place)
        self._run_job(lambda: self._report_failure(failure))

    def failure(self) -> Failure | None:
        """Return the first failure that this rank has read, at no cost."""
        return self._failure

    def check(self) -> None:
        """Raise if a rank is known to have failed, at no cost.

        Raises:
            RankFailed: it has; KeyboardInterrupt if it was interrupted.
        """
        if self._failure is not None:
            raise self._failure.as_error()

    def explain(self, error: BaseException) -> BaseException:
        """Return the cause of an error: RankFailed for a collective that another rank broke, else the error itself.

        If no rank announced a failure, a roll call follows. A rank that does not answer within 2 s has died, or hangs
        if the collective timed out. A rank outside of any collective hangs, or has left the group.

        Args:
            error: the exception; it becomes the cause of the returned one.

        Returns:
            The error, RankFailed, or KeyboardInterrupt if a rank was interrupted.
        """
        if not is_broken_collective(error):
            return error
        roll, was_late = None, is_late(error)
        self.leaves = True
        self._run_job(self._read_failure)
        if self._failure is None and not self.is_lost:
            roll = self._call_roll()
            self._run_job(lambda: self._find_culprit(roll, was_late))
        failure = self._failure
        if failure is not None and (failure.rank != self._rank or failure.kind in SEEN):
            explained = failure.as_error()
            explained.__cause__ = error
            error = explained
        if roll is not None:
            stacks = f"\n{roll.stacks}" if was_late else ""
            error.add_note(f"heliograph: places of the ranks, requested by rank {self._rank}:\n{roll}{stacks}")
        elif self.is_lost:
            error.add_note("heliograph: the store through which ranks report failures is gone.")
        return error

    def post(self, topic: str, text: str) -> None:
        """Post a text for all ranks, without waiting; only the first text of a topic counts."""
        self.notices.setdefault(topic, text)
        self._jobs.put(lambda: self._send(topic=topic, text=text))

    def posted(self, topic: str) -> str | None:
        """Return the text of a topic if this rank has read it, at no cost."""
        return self.notices.get(topic)

    def follow(self, run: Run) -> Callable[[], None]:
        """Report the place of a run, and end the process if the run hangs; return a function that ends this."""
        self.place = lambda: place_of(run)

        def end() -> None:
            self.place = None

        return end

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context for writing a checkpoint, in any thread, during which the process is not ended."""
        with self._lock:
            self._writes += 1
        try:
            yield
        finally:
            with self._lock:
                self._writes -= 1

    def close(self) -> None:
        """End the thread; may be called twice."""
        self._jobs.put(None)
        self._thread.join(BOUND)

    def _run_job(self, job: Job) -> None:
        # Waits for the thread, but not for ever: the store may be out of reach.
        done = threading.Event()

        def reported() -> None:
            try:
                job()
            finally:
                done.set()

        if self._thread.is_alive():
            self._jobs.put(reported)
            done.wait(BOUND)

    def _call_roll(self) -> Roll:
        roll = Roll(self._world_size, is_report=False)
        self._run_job(lambda: self._open(roll))
        roll.done.wait(BOUND)
        return roll

    # Jobs of the watch's thread.

    def _find_culprit(self, roll: Roll, was_late: bool) -> None:
        # Reports the rank that broke a collective silently, if the answers show it.
        self._read_failure()
        if self._failure is not None:
            return
        silence = f"no sign of life for {roll.limit:g} s"
        if roll.missing and was_late:  # a dead process would break the connection at once
            silence += ": its process is stopped (SIGSTOP), or its machine cannot be reached"
            self._report_failure(Failure(roll.missing[0], "hung", silence))
        elif roll.missing:
            self._report_failure(Failure(roll.missing[0], "died", silence))
        elif roll.working:
            rank = roll.working[0]
            self._report_failure(Failure(rank, "hung" if was_late else "left", f"it {roll.answers[rank][1]}"))

    def _report_failure(self, failure: Failure) -> None:
        # Only the first failure counts.
        first = Failure.read(self._first(FIRST, failure.write()))
        self._learn(first)
        if first != failure:
            return
        self._send(failure=True)
        end = monotonic() + ACKNOWLEDGED
        while self._host == self._rank and self._store.add(NOTED, 0) < self._world_size and monotonic() < end:
            sleep(self._interval / 10)

    def _read_failure(self) -> None:
        if self._store.check([FIRST]):
            self._learn(Failure.read(self._store.get(FIRST)))

    # The loop of the thread.

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._interval / 10 if self._rolls else self._interval)
                if job is None:
                    return
            except Empty:
                job = None
            try:
                if job is not None:
                    job()
                if not self.is_lost:
                    self._exchange()
            except DistError:  # `Watch.explain` reports it
                self.is_lost = True
                if self._failure is None and self._host not in (None, self._rank):
                    self._failure = Failure(self._host, "died", "its store is gone")
                while self._rolls:
                    self._rolls.pop().done.set()
            self._enforce_failure()

    def _exchange(self) -> None:
        for message in self._fresh():
            self._read_message(message)
        for roll in self._rolls[:]:
            if roll.collect(self._store):
                self._rolls.remove(roll)
                if roll.is_report:
                    text = f"{roll}\n{roll.stacks}"
                    logger.warning("rank %d waits in a collective. Places of the ranks:\n%s", self._rank, text)
        self._report_wait()

    def _send(self, **message: Any) -> None:
        # To all ranks, this one included.
        self._store.set(f"message/{self._store.add('messages', 1)}", json.dumps(message))

    def _fresh(self) -> Iterator[dict[str, Any]]:
        # The messages since the last call. A number may come before its message, or without one if its rank was killed.
        newest = self._store.add("messages", 0)
        self._unread.update(range(self._newest + 1, newest + 1))
        self._newest = newest
        for number in sorted(self._unread):
            if self._store.check([key := f"message/{number}"]):
                self._unread.remove(number)
                yield json.loads(self._store.get(key))

    def _read_message(self, message: dict[str, Any]) -> None:
        if "failure" in message:
            self._read_failure()
        elif "topic" in message:
            self.notices.setdefault(message["topic"], message["text"])
        else:
            if message["is_report"]:
                self._reports += 1
                self._next_report = 2 * max(self._seconds_waited(), self.limits.report_after)
            self._store.set(f"{message['roll']}/{self._rank}", json.dumps((*self._status(), _stacks())))

    def _learn(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self._store.add(NOTED, 1)

    def _status(self) -> tuple[str, str]:
        # Whether this rank waits in a collective, works outside of any, or leaves because one broke; and this in words.
        waiting, place = self._waiting(), "" if self.place is None else self.place()
        if self.leaves:
            return "leaves", "; ".join(filter(None, ["was waiting too, and leaves now", place]))
        functions = _functions(sys._current_frames().get(self._watched))
        if waiting is None:
            state, text = "works", "is in no collective"
        else:
            state, text = "waits", f"waits in {waiting[0]} for {monotonic() - waiting[1]:.0f} s"
        return state, "; ".join(filter(None, [text, place, functions and f"at {functions}"]))

    def _open(self, roll: Roll) -> None:
        self._rolls.append(roll)
        self._send(roll=roll.name, is_report=roll.is_report)

    def _report_wait(self) -> None:
        # One rank reports for all.
        if self._seconds_waited() < self._next_report:
            return
        self._next_report *= 2
        if self._first(f"report/{self._reports}", str(self._rank)) == str(self._rank):
            self._open(Roll(self._world_size, is_report=True))

    def _seconds_waited(self) -> float:
        # 0 outside of a collective.
        waiting = self._waiting()
        if waiting is None:
            return 0.0
        if waiting[1] != self._waits_since:
            self._waits_since, self._next_report = waiting[1], self.limits.report_after
        return monotonic() - waiting[1]

    def _first(self, key: str, value: str) -> str:
        # The first value that any rank has set.
        first: bytes = self._store.compare_set(key, "", value)
        return first.decode()

    def _enforce_failure(self) -> None:
        # Aborts the current collective if the backend can, and finally ends the process.
        if self._failure is None or self.leaves:
            return
        now, waits = monotonic(), self._waiting() is not None
        self._noted_at = self._noted_at or now
        if self._abort is not None and waits and now - self._noted_at >= ACKNOWLEDGED:
            abort, self._abort = self._abort, None
            abort()
        if self._writes:  # the grace starts again afterwards
            self._grace_since = 0.0
            return
        self._grace_since = self._grace_since or now
        if now - self._grace_since >= self.limits.grace and (waits or self.place is not None):
            ended = f"its run did not end within {self.limits.grace:g} s after the failure of a rank"
            text, failure = f"heliograph: rank {self._rank} is ended: {ended}", self._failure
            if failure.rank == self._rank and failure.kind in SEEN:
                failure = replace(failure, text="")  # the text is the place that follows
            os.write(2, f"{text} ({failure.as_error()}). It {self._status()[1]}.\n".encode())
            os._exit(1)  # an exception cannot reach a thread that hangs


class Roll:
    """A roll call: the watch of every rank answers with its status.

    Args:
        world_size: the number of ranks.
        is_report: whether it is logged.

    Attributes:
        name: the prefix of the keys of the answers.
        answers: the status of ranks that have answered, by rank: its state, its text, and the stacks of its threads.
        missing: the other ranks.
        limit: seconds until the roll call ends.
        done: set when it has ended.
    """

    def __init__(self, world_size: int, *, is_report: bool) -> None:
        self.name, self.is_report, self.limit = f"roll/{uuid4().hex}", is_report, ANSWERS
        self.answers: dict[int, tuple[str, str, str]] = {}
        self.missing = list(range(world_size))
        self.done = threading.Event()
        self._end = monotonic() + self.limit

    @property
    def working(self) -> list[int]:
        """The ranks that are in no collective, while others are or were."""
        return [rank for rank, (state, *_) in sorted(self.answers.items()) if state == "works"]

    @property
    def stacks(self) -> str:
        """The ranks that are in no collective, and the Python stacks of all threads; equal ones once."""
        ranks: dict[str, list[int]] = {}
        for rank, (*_, stacks) in sorted(self.answers.items()):
            ranks.setdefault(stacks, []).append(rank)
        parts = [f"in no collective: rank {_listed(self.working)}"] if self.working else []
        return "\n".join([*parts, *(f"stacks of rank {_listed(some)}:\n{stacks}" for stacks, some in ranks.items())])

    def collect(self, store: Store) -> bool:
        """Read new answers; return True if the roll call has ended."""
        for rank in self.missing[:]:
            if store.check([key := f"{self.name}/{rank}"]):
                self.answers[rank] = tuple(json.loads(store.get(key)))
                self.missing.remove(rank)
        if not self.missing or monotonic() > self._end:
            self.done.set()
        return self.done.is_set()

    def __str__(self) -> str:
        lines = {rank: text for rank, (_, text, _) in self.answers.items()}
        lines |= dict.fromkeys(self.missing, f"gives no sign of life for {self.limit:g} s")
        return "\n".join(f"  rank {rank} {lines[rank]}" for rank in sorted(lines))


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _stacks() -> str:
    # Of all threads of Python but this one. No source lines: reading them could hang too.
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines: list[str] = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines.append(f"  thread {names.get(ident, 'of a library')}, most recent call first")
            lines += [
                f'    File "{part.f_code.co_filename}", line {line}, in {part.f_code.co_qualname}'
                for part, line in walk_stack(frame)
            ]
    return "\n".join(lines)


def _functions(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None and len(names) < FRAMES:
        code = frame.f_code
        if not str(frame.f_globals.get("__name__")).startswith(BELOW):
            names.append(f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(names)
