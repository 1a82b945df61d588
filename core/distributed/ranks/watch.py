"""What a run uses of the watchdog: report a failure of this rank, and learn of one of another's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.distributed_c10d import Store

from ....events import Run
from ...system.errors import SEEN
from .failure import Failure, is_broken_collective, is_late
from .watchdog import Limits, Roll, Waiting, Watchdog, follow


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
        cloned: Any = store
        self._rank = rank
        self._lock = threading.Lock()
        self.limits = limits or Limits()
        self._watchdog = Watchdog(cloned.clone(), rank, world_size, waiting, host, self.limits, interval, abort)
        self._watchdog.start()

    def announce(self, error: BaseException, place: str) -> None:
        """Announce to all ranks that this one fails; only the first announcement of all counts.

        Args:
            error: why.
            place: where in the run.
        """
        self._watchdog.leaves = True
        failure = Failure.of(error, self._rank, place)
        self._watchdog.do(lambda: self._watchdog.report_failure(failure))

    def failure(self) -> Failure | None:
        """Return the first failure of all that this rank knows of; that costs nothing."""
        return self._watchdog.failure

    def check(self) -> None:
        """Raise where a rank has failed, as far as this one knows; that costs nothing.

        Raises:
            RankFailed: it has; KeyboardInterrupt where it was interrupted.
        """
        if self._watchdog.failure is not None:
            raise self._watchdog.failure.as_error()

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
        watchdog, roll = self._watchdog, None
        watchdog.leaves = True
        watchdog.do(watchdog.look_up)
        if watchdog.failure is None and not watchdog.is_lost:
            roll = watchdog.call_roll()
            watchdog.do(lambda: self._judge(roll, is_late(error)))
        failure = watchdog.failure
        if failure is not None and (failure.rank != self._rank or failure.kind in SEEN):
            explained = failure.as_error()
            explained.__cause__ = error
            error = explained
        if roll is not None:
            error.add_note(f"heliograph: rank {self._rank} asked where each rank is:\n{roll}")
        elif watchdog.is_lost:
            error.add_note("heliograph: the store by which the ranks report failures to each other is gone.")
        return error

    def post(self, topic: str, text: str) -> None:
        """Post a text for all ranks, without a wait; the first text of a topic counts."""
        self._watchdog.notices.setdefault(topic, text)
        self._watchdog.put(lambda: self._watchdog.post(topic, text))

    def posted(self, topic: str) -> str | None:
        """Return what a rank posted on a topic, as far as this one knows; that costs nothing."""
        return self._watchdog.notices.get(topic)

    def follow(self, run: Run) -> Callable[[], None]:
        """Report where this run is, and end the process if it does not end when it must; return what ends that."""
        self._watchdog.place, unfollow = follow(run)

        def end() -> None:
            self._watchdog.place = None
            unfollow()

        return end

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say that a checkpoint is being written, in whatever thread: until then the process is not ended."""
        with self._lock:
            self._watchdog.writes += 1
        try:
            yield
        finally:
            with self._lock:
                self._watchdog.writes -= 1

    def close(self) -> None:
        """End the thread; twice does no harm."""
        self._watchdog.close()

    def _judge(self, roll: Roll, was_late: bool) -> None:
        """Report to all ranks which one broke a collective silently, if the answers show it."""
        self._watchdog.look_up()
        if self._watchdog.failure is not None:
            return
        silence = f"no sign of life for {roll.limit:g} s"
        if roll.missing and was_late:  # of a process that is gone, the connection breaks at once
            silence += ": its process is stopped (SIGSTOP), or its machine cannot be reached"
            self._watchdog.report_failure(Failure(roll.missing[0], "hung", silence))
        elif roll.missing:
            self._watchdog.report_failure(Failure(roll.missing[0], "died", silence))
        elif roll.working:
            rank = roll.working[0]
            self._watchdog.report_failure(Failure(rank, "hung" if was_late else "left", f"it {roll.answers[rank]}"))
