"""A training in a thread of its own, which stops at events and waits."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from threading import Semaphore, Thread
from typing import Any

from heliograph.core.result import RunResult
from heliograph.events import CATALOGUE, Bus, Event, Lane, Run
from heliograph.events.bus import Handle

Wanted = Callable[[Run, Event], bool]


class Abandoned(BaseException):
    """Ends a training that nobody wants to continue."""


class Stage:
    """Trains in a thread, from one wanted event to the next. A debugger or a notebook has the other one.

    Args:
        train: trains; called in the thread.

    Attributes:
        run: the run, None before its first event.
        event: the event at which the training waits, after all other handlers; None when it has ended.
        result: what the training returned, None before its end.
    """

    def __init__(self, train: Callable[[], RunResult]) -> None:
        self.run: Run | None = None
        self.event: Event | None = None
        self.result: RunResult | None = None
        self._train, self._error = train, list[BaseException]()
        self._wanted: Wanted = lambda *_: False
        self._may_continue, self._has_stopped = Semaphore(0), Semaphore(0)
        self._errand: Callable[[], object] | None = None
        self._is_abandoned = False
        context = contextvars.copy_context()
        self._thread = Thread(target=lambda: context.run(self._work), name="heliograph-rerun", daemon=True)

    def subscribe(self, bus: Bus) -> list[Handle]:
        """Handle all events of a bus, after all other handlers."""
        events = dict.fromkeys([*CATALOGUE, *(signal.event for signal in bus.signals())])
        return [bus.on(event, self._handle, lane=Lane.REPORT) for event in events]

    def go_to(self, wanted: Wanted) -> bool:
        """Train until an event is wanted; return whether one was: the training may end before.

        Raises:
            BaseException: the training failed.
        """
        self._wanted, self.event = wanted, None
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._may_continue.release()
        self._has_stopped.acquire()
        if self._error:
            raise self._error.pop()
        return self.event is not None

    def call(self, errand: Callable[[], object]) -> None:
        """Call a function in the thread of the training, which waits at an event."""
        assert self.event is not None
        self._errand = errand
        self._may_continue.release()
        self._has_stopped.acquire()

    def close(self) -> None:
        """Leave the training where it is.

        Raises:
            BaseException: it failed otherwise than by that.
        """
        if self._thread.ident is not None and self._thread.is_alive():
            self._is_abandoned = True
            self._may_continue.release()
        if self._thread.ident is not None:
            self._thread.join()
        self.event = None
        if self._error and not _is_abandonment(self._error[0]):
            raise self._error.pop()

    def _work(self) -> None:
        try:
            self.result = self._train()
        except BaseException as error:  # noqa: BLE001  # it is raised where the training is waited for
            self._error.append(error)
        finally:
            self._has_stopped.release()

    def _handle(self, run: Run, event: Event) -> None:
        self.run = run
        if not self._is_abandoned and self._wanted(run, event):
            self.event = event
            self._has_stopped.release()
            self._may_continue.acquire()
            while (errand := self._errand) is not None:
                self._errand = None
                errand()
                self._has_stopped.release()
                self._may_continue.acquire()
        if self._is_abandoned and event.name not in ("run_failed", "run_closed"):
            raise Abandoned


def _is_abandonment(error: Any) -> bool:
    """Return whether an error is an abandonment, or was made of one."""
    while error is not None:
        if isinstance(error, Abandoned):
            return True
        error = error.__cause__
    return False
