"""The watch of the ranks over each other: report a failure, notice one of another's, end a process that hangs."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from types import FrameType
from typing import Any, Literal, Self

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ....events import CATALOGUE, Event, Lane, Run
from ....events import catalogue as ev
from ....events.bus import FunctionName, Handle, Subscription
from ....events.errors import place_of
from ...system.errors import SEEN
from .failure import Failure, JsonFacts, is_broken_collective, is_late

Waiting = Callable[[], tuple[str, float] | None]
Job = Callable[[], None]
FIRST, NOTED = "failure", "noted"  # keys of the store
ACKNOWLEDGED = 1.0  # seconds for the others to note a failure, before the store ends with the rank that hosts it
BOUND = 5.0  # seconds that the main thread waits for this one at most
logger = logging.getLogger("heliograph")
ANSWERS = 2.0  # seconds in which a living rank answers
FRAMES = 6  # how many functions a report names
BELOW = ("torch.", "heliograph.core.distributed.ranks.", "heliograph.core.engines.")  # in every collective the same


@dataclass(slots=True)
class Limits:
    """How long a watch puts up with something; it may be changed at any time.

    Attributes:
        report_after: seconds in one collective after which it is logged where each rank is; then at twice that.
        grace: seconds that a run gets to end by itself once another rank has failed, before the process is ended;
            those in which it writes a checkpoint are not counted.
    """

    report_after: float = 60.0
    grace: float = 30.0


class Watch:
    """The watch of one rank over its group; a thread of it talks to the others by way of the store.

    A wait in a collective of gloo cannot be broken off from within. So a rank that fails announces it and then leaves
    the group, which breaks the collectives of the others; theirs are explained by what it announced. How long the
    others wait for a rank, from their next collective on:

    - It fails in code: until it has left the group, a fraction of a second.
    - Its process dies: no longer; then 2 s, for the roll to show who is gone.
    - It hangs or is stopped: as long as the engine's `timeout`, and those 2 s. Its process ends itself `limits.grace`
      later, what it is writing being finished before; unless it is stopped.

    Where each rank is is logged before, when a wait gets long. As long as a collective waits, Python runs no signal
    handlers: a SIGTERM or Ctrl-C is seen when it returns.

    Args:
        store: what only this group's processes read and write; a clone of it is used.
        rank: this rank.
        world_size: how many there are.
        waiting: returns the name of the collective that this thread is in, with `time.monotonic()` of its beginning;
            None outside of any.
        host: the rank whose process hosts the store; None where another process does (torchrun's agent).
        limits: when waits are reported, and when the process is ended.
        interval: seconds between two looks at the store.
        abort: breaks off the collective that this thread is in, where the backend can (nccl).

    Attributes:
        notices: what was posted, by topic.
        place: returns where the run is; None outside of one.
        leaves: whether the main thread ends its run already.
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
        clone: Store = store.clone()  # type: ignore[attr-defined]  # a client serves one thread at a time
        self._store, self._news = clone, News(clone, rank, world_size)
        self._rank, self._world_size, self._host = rank, world_size, host
        self._waiting, self._interval, self._abort = waiting, interval, abort
        self._watched, self._lock = threading.get_ident(), threading.Lock()
        self._writes = 0  # checkpoints that are being written; the process is not ended during one
        self._noted_at = self._grace_since = self._waits_since = 0.0
        self._next_report = math.inf
        self._reports = self._calls = 0
        self._rolls: list[Roll] = []
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="heliograph-watch", daemon=True)
        self._thread.start()

    # For the main thread.

    def announce(self, error: BaseException, place: str) -> None:
        """Announce to all ranks that this one fails; only the first announcement of all counts.

        Args:
            error: why.
            place: where in the run.
        """
        self.leaves = True
        failure = Failure.of(error, self._rank, place)
        self._do(lambda: self._report_failure(failure))

    def failure(self) -> Failure | None:
        """Return the first failure of all that this rank knows of; that costs nothing."""
        return self._failure

    def check(self) -> None:
        """Raise where a rank has failed, as far as this one knows; that costs nothing.

        Raises:
            RankFailed: it has; KeyboardInterrupt where it was interrupted.
        """
        if self._failure is not None:
            raise self._failure.as_error()

    def explain(self, error: BaseException) -> BaseException:
        """Return the cause of an error: RankFailed for a collective that others broke, else the error itself.

        Where nobody announced a failure, the roll is called: a rank that gives no answer within 2 s has died, or hangs
        where the collective was waited for too long; one that is in no collective hangs, or has left the group.

        Args:
            error: what was raised; it is the cause of what is returned.

        Returns:
            The error, RankFailed, or KeyboardInterrupt where a rank was interrupted.
        """
        if not is_broken_collective(error):
            return error
        roll = None
        self.leaves = True
        self._do(self._look_up)
        if self._failure is None and not self.is_lost:
            roll = self._call_roll()
            self._do(lambda: self._judge(roll, is_late(error)))
        failure = self._failure
        if failure is not None and (failure.rank != self._rank or failure.kind in SEEN):
            explained = failure.as_error()
            explained.__cause__ = error
            error = explained
        if roll is not None:
            error.add_note(f"heliograph: rank {self._rank} asked where each rank is:\n{roll}")
        elif self.is_lost:
            error.add_note("heliograph: the store by which the ranks report failures to each other is gone.")
        return error

    def post(self, topic: str, text: str) -> None:
        """Post a text for all ranks, without a wait; the first text of a topic counts."""
        self.notices.setdefault(topic, text)
        self._jobs.put(lambda: self._news.post(topic=topic, text=text))

    def posted(self, topic: str) -> str | None:
        """Return what a rank posted on a topic, as far as this one knows; that costs nothing."""
        return self.notices.get(topic)

    def follow(self, run: Run) -> Callable[[], None]:
        """Report where this run is, and end the process if it does not end when it must; return what ends that."""
        self.place, unfollow = follow(run)

        def end() -> None:
            self.place = None
            unfollow()

        return end

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say that a checkpoint is being written, in whatever thread: until then the process is not ended."""
        with self._lock:
            self._writes += 1
        try:
            yield
        finally:
            with self._lock:
                self._writes -= 1

    def close(self) -> None:
        """End the thread; twice does no harm."""
        self._jobs.put(None)
        self._thread.join(BOUND)

    def _do(self, job: Job) -> None:
        """Have the thread do something, and wait for that, if not for ever: the store may be out of reach."""
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
        """Ask all ranks where they are; return their answers."""
        roll = self._new_roll(is_report=False)
        self._do(lambda: self._open(roll))
        roll.done.wait(BOUND)
        return roll

    # Jobs of the thread.

    def _judge(self, roll: Roll, was_late: bool) -> None:
        """Report to all ranks which one broke a collective silently, if the answers show it."""
        self._look_up()
        if self._failure is not None:
            return
        silence = f"no sign of life for {roll.limit:g} s"
        if roll.missing and was_late:  # of a process that is gone, the connection breaks at once
            silence += ": its process is stopped (SIGSTOP), or its machine cannot be reached"
            self._report_failure(Failure(roll.missing[0], "hung", silence))
        elif roll.missing:
            self._report_failure(Failure(roll.missing[0], "died", silence))
        elif roll.working:
            rank = roll.working[0]
            self._report_failure(Failure(rank, "hung" if was_late else "left", f"it {roll.answers[rank]}"))

    def _report_failure(self, failure: Failure) -> None:
        """Report a failure to all ranks, unless there is one already."""
        first = Failure.read(self._first(FIRST, failure.write()))
        self._learn(first)
        if first != failure:
            return
        self._news.post(failure=True)
        end = monotonic() + ACKNOWLEDGED
        while self._host == self._rank and self._store.add(NOTED, 0) < self._world_size and monotonic() < end:
            sleep(self._interval / 10)

    def _look_up(self) -> None:
        """Learn of a failure before the next look."""
        if self._store.check([FIRST]):
            self._learn(Failure.read(self._store.get(FIRST)))

    # Its own business.

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
            except DistError:  # reported in what `Watch.explain` returns
                self.is_lost = True
                if self._failure is None and self._host not in (None, self._rank):
                    self._failure = Failure(self._host, "died", "the store that it hosted is gone")
                while self._rolls:
                    self._rolls.pop().done.set()
            self._mind_failure()

    def _exchange(self) -> None:
        """Read what others posted, collect answers, and ask where all are when a wait gets long."""
        for message in self._news.fresh():
            self._read_message(message)
        for roll in self._rolls[:]:
            if roll.collect(self._store):
                self._rolls.remove(roll)
                if roll.is_report:
                    logger.warning("rank %d waits in a collective. Where each rank is:\n%s", self._rank, roll)
        self._mind_wait()

    def _read_message(self, message: dict[str, Any]) -> None:
        if "failure" in message:
            self._look_up()
        elif "topic" in message:
            self.notices.setdefault(message["topic"], message["text"])
        else:
            if message["is_report"]:
                self._reports += 1
                self._next_report = 2 * max(self._seconds_waited(), self.limits.report_after)
            self._store.set(f"{message['roll']}/{self._rank}", self._status().write())

    def _learn(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self._store.add(NOTED, 1)

    def _status(self) -> RankStatus:
        place = "" if self.place is None else self.place()
        return RankStatus.of(self._watched, self._waiting(), place, leaves=self.leaves)

    def _new_roll(self, *, is_report: bool) -> Roll:
        self._calls += 1
        return Roll(f"roll/{self._rank}/{self._calls}", self._world_size, is_report=is_report)

    def _open(self, roll: Roll) -> None:
        self._rolls.append(roll)
        self._news.post(roll=roll.name, is_report=roll.is_report)

    def _mind_wait(self) -> None:
        """Call the roll for a report, where the main thread waits for long and no other rank has called it."""
        if self._seconds_waited() < self._next_report:
            return
        self._next_report *= 2
        if self._first(f"report/{self._reports}", str(self._rank)) == str(self._rank):
            self._open(self._new_roll(is_report=True))

    def _seconds_waited(self) -> float:
        """Return for how many seconds the main thread has been in its collective, 0 outside of any."""
        waiting = self._waiting()
        if waiting is None:
            return 0.0
        if waiting[1] != self._waits_since:
            self._waits_since, self._next_report = waiting[1], self.limits.report_after
        return monotonic() - waiting[1]

    def _first(self, key: str, value: str) -> str:
        """Return the first value that any rank gave to a key, perhaps this one."""
        first: bytes = self._store.compare_set(key, "", value)
        return first.decode()

    def _mind_failure(self) -> None:
        """Break off the collective that the main thread is in, where that is possible; end the process at last."""
        if self._failure is None or self.leaves:
            return
        now, waits = monotonic(), self._waiting() is not None
        self._noted_at = self._noted_at or now
        if self._abort is not None and waits and now - self._noted_at >= ACKNOWLEDGED:
            abort, self._abort = self._abort, None
            abort()
        if self._writes:  # what follows has the whole grace
            self._grace_since = 0.0
            return
        self._grace_since = self._grace_since or now
        if now - self._grace_since >= self.limits.grace and (waits or self.place is not None):
            ended = f"its run has not ended {self.limits.grace:g} s after another's end"
            text, failure = f"heliograph: rank {self._rank} is ended: {ended}", self._failure
            if failure.rank == self._rank and failure.kind in SEEN:
                failure = replace(failure, text="")  # others saw where it is, which follows
            os.write(2, f"{text} ({failure.as_error()}). It {self._status()}.\n".encode())
            os._exit(1)  # no exception reaches a thread that hangs


BELL = "bell"


class News:
    """What all ranks post, each in its own row, read once. One look costs one question to the store.

    Args:
        store: what only this group's processes read and write.
        rank: this rank.
        world_size: how many there are.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._posted, self._read, self._rung = 0, [0] * world_size, 0

    def post(self, **message: Any) -> None:
        """Post a message of plain types; this rank reads it too."""
        self._store.set(_key(self._rank, self._posted), json.dumps(message))
        self._posted += 1
        self._store.add(BELL, 1)

    def fresh(self) -> Iterator[dict[str, Any]]:
        """Yield what was posted since the last look."""
        rung = self._store.add(BELL, 0)
        if rung == self._rung:
            return
        self._rung = rung
        for rank in range(len(self._read)):
            while self._store.check([key := _key(rank, self._read[rank])]):
                self._read[rank] += 1
                yield json.loads(self._store.get(key))


def _key(rank: int, number: int) -> str:
    return f"news/{rank}/{number}"


@dataclass(frozen=True, slots=True)
class RankStatus(JsonFacts):
    """What one rank reports of itself.

    Attributes:
        state: it waits in a collective, it works outside of any, or it leaves since one broke.
        collective: in which it waits, or which broke.
        seconds: since when it waits.
        place: where its run is; empty outside of a run.
        functions: those that its main thread is in, the innermost first; empty where it leaves.
    """

    state: Literal["waits", "works", "leaves"]
    collective: str
    seconds: float
    place: str
    functions: str

    @classmethod
    def of(cls, thread: int, waiting: tuple[str, float] | None, place: str, *, leaves: bool) -> Self:
        """Return where the thread of this number is."""
        name, since = waiting or ("", monotonic())
        state: Literal["waits", "works", "leaves"] = "leaves" if leaves else "waits" if waiting else "works"
        frame = None if leaves else sys._current_frames().get(thread)
        functions = _functions(frame, everything=waiting is None)
        return cls(state, name, monotonic() - since, place, functions)

    def __str__(self) -> str:
        kinds = {
            "waits": f"waits in {self.collective} for {self.seconds:.0f} s",
            "works": "is in no collective",
            "leaves": "was waiting too, and leaves now",
        }
        parts = [kinds[self.state], self.place, self.functions and f"at {self.functions}"]
        return "; ".join(part for part in parts if part)


class Roll:
    """One call of the roll: every rank's watch answers where it is.

    Args:
        name: the prefix of the answers' keys.
        world_size: how many ranks there are.
        is_report: whether it is to be logged.

    Attributes:
        answers: where those are that have answered, by rank.
        missing: the ranks that have not.
        limit: seconds until the roll is closed.
        done: set when it is.
    """

    def __init__(self, name: str, world_size: int, *, is_report: bool) -> None:
        self.name, self.is_report, self.limit = name, is_report, ANSWERS
        self.answers: dict[int, RankStatus] = {}
        self.missing = list(range(world_size))
        self.done = threading.Event()
        self._end = monotonic() + self.limit

    @property
    def working(self) -> list[int]:
        """The ranks that are in no collective, though others are or were."""
        return [rank for rank, status in sorted(self.answers.items()) if status.state == "works"]

    def collect(self, store: Store) -> bool:
        """Read what has come; return whether the roll is closed."""
        for rank in self.missing[:]:
            if store.check([key := f"{self.name}/{rank}"]):
                self.answers[rank] = RankStatus.read(store.get(key))
                self.missing.remove(rank)
        if not self.missing or monotonic() > self._end:
            self.done.set()
        return self.done.is_set()

    def __str__(self) -> str:
        lines = {rank: str(status) for rank, status in self.answers.items()}
        lines |= dict.fromkeys(self.missing, f"gives no sign of life for {self.limit:g} s")
        return "\n".join(f"  rank {rank} {lines[rank]}" for rank in sorted(lines))


def _functions(frame: FrameType | None, *, everything: bool) -> str:
    names: list[str] = []
    while frame is not None and len(names) < FRAMES:
        code = frame.f_code
        if everything or not str(frame.f_globals.get("__name__")).startswith(BELOW):
            names.append(f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(names)


WATCH = FunctionName("watch_of_ranks")  # what plans and times call it
OF_BATCHES = (ev.BatchStart, ev.ForwardEnd, ev.BackwardEnd, ev.GradientsReady, ev.StepEnd)
QUIET = (*OF_BATCHES, ev.Log, ev.ShouldStop, ev.Replay)  # a listener changes the loop, or costs time in every batch


def follow(run: Run) -> tuple[Callable[[], str], Callable[[], None]]:
    """Subscribe to a run; return what shows where it is, and what ends the subscription."""
    last = ""

    def note(_: Run, *, event: Event) -> None:
        nonlocal last
        last = event.name

    def place() -> str:
        return f"{place_of(run)}, last event {last or 'none'}"

    handles = ExitStack()
    for kind in CATALOGUE:
        if kind not in QUIET:
            signal, last_of_lane = run.bus.signal(kind), Subscription((Lane.REPORT, sys.maxsize), WATCH)
            signal.connect(note, weak=False, subscription=last_of_lane)
            handles.enter_context(Handle(signal, note))
    return place, handles.close
