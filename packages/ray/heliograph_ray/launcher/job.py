"""A call on Ray from its start to its end, attempt by attempt."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Never

from heliograph.core.distributed.exceptions import ProcessFailure

from .attempts import GroupTracker, WorkerGroup
from .capacity import explain_start_timeout
from .driver_loop import DriverLoop
from .failures import AttemptFailure, classify_failure
from .fit import Fit
from .sizes import Sizes

MAX_DELAY = 60.0  # seconds from one attempt to the next

logger = logging.getLogger("heliograph")


class RayJob:
    """Runs a call on workers, in as many attempts as it takes.

    Args:
        loop: processes the workers' messages.
        tracker: records them.
        sizes: the allowed numbers of workers.
        start: starts the workers of an attempt, whose id it is given.
        max_failures: how many lost or hung workers are replaced; -1 for any number.
        backoff: seconds before the second attempt.
    """

    def __init__(
        self,
        loop: DriverLoop,
        tracker: GroupTracker,
        sizes: Sizes,
        start: Callable[[str], Fit],
        *,
        max_failures: int,
        backoff: float,
    ) -> None:
        self._loop, self._tracker, self._sizes, self._start = loop, tracker, sizes, start
        self._max_failures, self._backoff = max_failures, backoff
        self._failures = 0
        self._failures_in_a_row = 0  # without progress in between
        self._batches_done = 0

    def run(self) -> WorkerGroup:
        """Run attempts until one completes; return its worker group.

        Raises:
            BaseException: what a worker raised.
        """
        with self._loop.handle_signals():
            group = self._run_attempt()
            while group is None:
                group = self._run_attempt()
        self._raise_driver_error()
        return group

    def _run_attempt(self) -> WorkerGroup | None:
        """Run the workers once; return their group if all completed, None if another attempt follows.

        Raises:
            BaseException: what ends the call without another attempt.
        """
        fit = self._start(self._tracker.start_fit())
        error = self._loop.run_fit(fit, self._sizes)
        group, is_stopping = self._tracker.group, self._loop.is_stopping
        if group is not None and group.is_complete and (is_stopping or not group.exit_notices):
            if error is not None:
                logger.warning("all ranks had returned when Ray's run failed: %s", error)
            self._tracker.end_fit("completed")
            return group
        failure = classify_failure(group, explain_start_timeout(error, self._sizes), is_stopping=is_stopping)
        self._tracker.end_fit(failure.kind, failure.text)
        self._raise_driver_error(failure)
        if fit.is_reused and failure.kind in ("lost", "hung") and not (group is not None and group.has_started):
            logger.warning("the workers that were kept are gone, and others start: %s", failure.text)
            return None
        self._loop.pause(self._delay(failure))
        self._raise_driver_error()
        return None

    def _delay(self, failure: AttemptFailure) -> float:
        """Return the seconds until the next attempt.

        Raises:
            BaseException: no attempt follows.
        """
        number = len(self._tracker.groups)
        if failure.kind == "preempted":
            logger.warning("attempt %d was preempted, and another one follows: %s", number, failure.text)
            return 0.0
        if failure.kind == "failed":
            _raise(failure)
        self._failures += 1
        if self._failures > self._max_failures >= 0:
            _raise(failure, f"heliograph: no other attempt follows number {number}: max_failures={self._max_failures}")
        batches_done = max(group.batches_done for group in self._tracker.groups)
        self._failures_in_a_row = 1 if batches_done > self._batches_done else self._failures_in_a_row + 1
        self._batches_done = batches_done
        delay = float(min(MAX_DELAY, self._backoff * 2 ** (self._failures_in_a_row - 1)))
        what = "hung" if failure.kind == "hung" else "was lost"
        logger.warning("attempt %d %s, and another one follows in %g s: %s", number, what, delay, failure.text)
        return delay

    def _raise_driver_error(self, failure: AttemptFailure | None = None) -> None:
        """Raise what happened in this process: an error, or a signal."""
        error: BaseException | None = self._loop.error
        for signum in self._loop.signals:
            error = error or (KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum))
        if error is not None:
            if failure is not None and any(each.text for each in failure.errors[:1]):  # a worker's own
                error.add_note(f"heliograph: meanwhile, {failure.text}")
            raise error


def _raise(failure: AttemptFailure, note: str = "") -> Never:
    first = failure.errors[0]
    if note:
        first.error.add_note(note)
    if not first.text and first.error is not failure.cause:  # ours; a worker's error has its own cause, or none
        first.error.__cause__ = failure.cause
    ProcessFailure.raise_first(list(failure.errors), [], 0.0, set())
    raise AssertionError("an attempt that failed has an error")
