"""A thread that writes while training continues; the loop asks it whether it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Thread
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST_WAIT = 0.1  # seconds: a signal that comes just before a wait is seen after it only


@dataclass(slots=True)
class _Job:
    """One piece of work, in a daemon thread of its own that ends with it."""

    work: Callable[[], Any]
    then: Callable[[Any], object]
    done: Event = field(default_factory=Event)
    result: Any = None
    error: BaseException | None = None
    thread: Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = Thread(target=self._run, name="heliograph-background", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:  # noqa: BLE001  # raised where the job is asked after
            self.error = error
        finally:
            self.done.set()


def nothing(result: object) -> None:
    """Do nothing with a result."""


class BackgroundWorker:
    """Does one job at a time in a thread. `poll` and `drain` raise its errors in the thread that submitted it.

    Attributes:
        waited: seconds that `submit`, `drain` and `wait` have waited in all.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._job: _Job | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is running, and nothing done is still to be reported."""
        return self._job is None

    @property
    def is_done(self) -> bool:
        """Whether a job is done and still to be reported."""
        return self._job is not None and self._job.done.is_set()

    def submit(self, work: Callable[[], T], then: Callable[[T], object] = nothing) -> None:
        """Begin a job, as soon as the former one is done.

        Args:
            work: called in a thread of its own.
            then: called with the result, by `poll` or `drain`; it may submit another.

        Raises:
            BaseException: the former job failed; this one is not begun.
        """
        self.drain()
        self._job = _Job(work, then)

    def forget(self) -> None:
        """Let the running job end; nothing is reported."""
        self._job = None

    def poll(self) -> None:
        """Report how the job ended, if it is done.

        Raises:
            BaseException: it failed. An error is raised once.
        """
        if self._job is not None and self.is_done:
            self._report_end(self._job)

    def drain(self) -> None:
        """Wait until nothing is under way. Ctrl-C interrupts the waiting, not the job.

        Raises:
            BaseException: the job failed. An error is raised once.
        """
        while (job := self._job) is not None:
            self.wait()
            self._report_end(job)

    def wait(self) -> None:
        """Wait until the job is done, without a report. Ctrl-C interrupts the waiting, not the job."""
        if self._job is None or self.is_done:
            return
        since = perf_counter()
        try:
            while not self._job.done.wait(LONGEST_WAIT):
                pass
        finally:
            self.waited += perf_counter() - since

    def _report_end(self, job: _Job) -> None:
        job.thread.join()  # it has nothing left to do; no thread is to be seen after its job
        self._job = None
        if job.error is not None:
            raise job.error
        job.then(job.result)
