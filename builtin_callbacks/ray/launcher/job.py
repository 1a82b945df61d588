"""A call on Ray from its start to its end, attempt by attempt."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any, Never

from ....core.distributed.launch.exceptions import raise_first
from .attempts import Group, Journal
from .driver_loop import Hearing
from .failures import Verdict, judge
from .room import explained
from .sizes import Sizes

LONGEST = 60.0  # seconds from one attempt to the next, at most

logger = logging.getLogger("heliograph")


class RayJob:
    """Workers that run one call, again and again until they have.

    Args:
        hearing: hears them.
        journal: where what they tell is entered.
        sizes: how many workers will do.
        make_trainer: makes Ray's trainer for an attempt, which is given a name of its own.
        max_failures: how many lost or hung workers are made up for; -1 for any number.
        backoff: seconds before the first new attempt.
    """

    def __init__(
        self,
        hearing: Hearing,
        journal: Journal,
        sizes: Sizes,
        make_trainer: Callable[[str], Any],
        *,
        max_failures: int,
        backoff: float,
    ) -> None:
        self._hearing, self._journal, self._sizes, self._make_trainer = hearing, journal, sizes, make_trainer
        self._max_failures, self._backoff = max_failures, backoff
        self._failures = self._in_a_row = self._reach = 0

    def run(self) -> Group:
        """Run the workers until all have completed; return what they told then.

        Raises:
            BaseException: what a worker raised.
        """
        with self._hearing.signals():
            group = self._try()
            while group is None:
                group = self._try()
        self._raise_own()
        return group

    def _try(self) -> Group | None:
        """Have Ray run the workers once; return what they told if all have completed.

        Raises:
            BaseException: what ends the run for good.
        """
        trainer = self._make_trainer(self._journal.open())
        error = self._hearing.during(trainer.fit, self._sizes)
        group, was_asked = self._journal.group, self._hearing.is_stopping
        if group is not None and group.is_complete and (was_asked or not group.left):
            if error is not None:
                logger.warning("all ranks had returned when Ray's run failed: %s", error)
            self._journal.close("completed")
            return group
        verdict = judge(group, explained(error, self._sizes), was_asked=was_asked)
        self._journal.close(verdict.kind, None if verdict.kind == "resized" else verdict.text)
        self._raise_own(verdict)
        self._hearing.pause(self._delay(verdict))
        self._raise_own()
        return None

    def _delay(self, verdict: Verdict) -> float:
        """Return the seconds until the next attempt.

        Raises:
            BaseException: there is to be none.
        """
        number = len(self._journal.groups)
        if verdict.kind == "resized":
            self._sizes.settle(self._journal.groups[-1].world_size)
            logger.warning("attempt %d ends for another number of workers: %s", number, verdict.text)
            return 0.0
        if verdict.kind == "preempted":
            logger.warning("attempt %d was preempted, and another one follows: %s", number, verdict.text)
            return 0.0
        if verdict.kind == "failed":
            _raise(verdict)
        self._failures += 1
        if self._failures > self._max_failures >= 0:
            _raise(verdict, f"heliograph: no other attempt follows number {number}: max_failures={self._max_failures}")
        reach = max(group.reach for group in self._journal.groups)
        self._in_a_row = 1 if reach > self._reach else self._in_a_row + 1
        self._reach = reach
        delay = float(min(LONGEST, self._backoff * 2 ** (self._in_a_row - 1)))
        became = "hung" if verdict.kind == "hung" else "was lost"
        logger.warning("attempt %d %s, and another one follows in %g s: %s", number, became, delay, verdict.text)
        return delay

    def _raise_own(self, verdict: Verdict | None = None) -> None:
        """Raise what happened in this process, if anything did."""
        error: BaseException | None = self._hearing.own
        for signum in self._hearing.heard:
            error = error or (KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum))
        if error is not None:
            if verdict is not None and any(each.text for each in verdict.errors[:1]):  # a worker's own
                error.add_note(f"heliograph: meanwhile, {verdict.text}")
            raise error


def _raise(verdict: Verdict, note: str = "") -> Never:
    first = verdict.errors[0]
    if note:
        first.error.add_note(note)
    if not first.text and first.error is not verdict.cause:  # ours, not a worker's: that has its own cause, or none
        first.error.__cause__ = verdict.cause
    raise_first(list(verdict.errors), [], 0.0, set())
    raise AssertionError("a verdict has an error")
