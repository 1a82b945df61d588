"""A training in a thread that pauses at events."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Collection
from threading import Condition, Thread
from typing import Any, Literal

from heliograph import Bus, Lane, Log, PluginChanged, Run, RunResult
from heliograph.events import CATALOGUE, Event, FunctionName, Subscription
from heliograph.spi import capture, describe, restore

Wanted = Callable[[Run, Event], bool]


class LeftTraining(BaseException):
    """Ends a training that is not continued."""


class PausedThread:
    """Trains in a thread, and pauses at wanted events, so that another thread can inspect the training.

    Draws from the global generators during a pause do not affect the training.

    Args:
        train: called in the thread.

    Attributes:
        run: None before its first event.
        event: the event of the pause; None outside of a pause.
        result: None before the end of the training.
    """

    def __init__(self, train: Callable[[], RunResult]) -> None:
        self.run: Run | None = None
        self.event: Event | None = None
        self.result: RunResult | None = None
        self._train, self._error = train, list[BaseException]()
        self._wanted: Wanted = lambda *_: False
        self._work: Callable[[], object] | None = None  # a function to call in the thread
        self._state: Literal["new", "running", "waiting", "ended"] = "new"
        self._changed = Condition()
        self._is_left = False
        context = contextvars.copy_context()
        self._thread = Thread(target=lambda: context.run(self._run), name="heliograph-rerun", daemon=True)

    def subscribe(self, bus: Bus, *, left_out: Collection[str], recorder: str) -> None:
        """Handle all events of a bus, after all other handlers.

        `Log` is handled only if plugins of the recorded run handle it: without a handler, the loop does not collect
        losses for it, and the rerun must do the same.

        Args:
            bus: of the training.
            left_out: the names of plugins that are disabled in the rerun only.
            recorder: the name of the recorder of the rerun.
        """
        handles = {
            event: bus.on(event, self._handle, lane=Lane.REPORT)
            for event in dict.fromkeys([*CATALOGUE, *(signal.event for signal in bus.signals())])
        }
        signal, rerun_only = bus.signal(Log), (describe(self._handle), recorder)

        def follow(run: Run | None, event: PluginChanged | None) -> None:  # noqa: ARG001  # a handler
            subscriptions = [entry for entry in signal.subscriptions.values() if entry.owner not in rerun_only]
            is_handled = any(not entry.paused or entry.owner in left_out for entry in subscriptions)
            (handles[Log].resume if is_handled else handles[Log].pause)()

        follow(None, None)
        before_all = Subscription((Lane.TRANSFORM, -3), FunctionName(describe(follow)))
        bus.signal(PluginChanged).connect(follow, weak=False, subscription=before_all)

    def go_to(self, wanted: Wanted) -> bool:
        """Train until an event is wanted; return False if the training ends first.

        Errors of the training and of `wanted` are raised here. After an error of `wanted` or a KeyboardInterrupt, the
        training pauses at that event or the next.
        """
        self._wait()
        if self._state == "ended":
            raise RuntimeError("The training has ended.")
        self._wanted, self.event = wanted, None
        try:
            if self._state == "new":
                self._state = "running"
                self._thread.start()
            else:
                self._continue()
            self._wait()
        except KeyboardInterrupt:  # at any line, or the training would not pause at its next event
            self._wanted = lambda *_: True
            raise
        if self._error:
            raise self._error.pop()
        return self.event is not None

    def call(self, work: Callable[[], object]) -> None:
        """Call a function in the thread of the training, during a pause."""
        if self._state != "waiting":
            raise RuntimeError("The training is not paused at an event.")
        self._work = work
        self._continue()
        self._wait()
        if self._error:
            raise self._error.pop()

    def close(self) -> None:
        """End the training at its pause; raise an error that it had before. Closing twice does nothing."""
        self._is_left = True
        if self._state == "waiting":
            self._continue()
        if self._thread.ident is not None:
            with self._changed:  # `wait_for` releases the lock fully, even if a Ctrl-C left it acquired
                self._changed.wait_for(lambda: self._state == "ended")
            self._thread.join()
        self._state, self.event = "ended", None
        if self._error and not _was_left(self._error[0]):
            raise self._error.pop()
        self._error.clear()

    def _continue(self) -> None:
        with self._changed:
            self._state = "running"
            self._changed.notify_all()

    def _wait(self) -> None:
        """Wait until the training pauses or ends."""
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._state != "running")
        except KeyboardInterrupt:
            self._wanted = lambda *_: True
            raise

    # In the thread.

    def _run(self) -> None:
        try:
            self.result = self._train()
        except BaseException as error:  # noqa: BLE001  # raised in the waiting thread
            self._error.append(error)
        with self._changed:
            self._state = "ended"
            self._changed.notify_all()

    def _handle(self, run: Run, event: Event) -> None:
        self.run = run
        if not self._is_left and self._is_wanted(run, event):
            self.event, draws = event, capture()
            self._stop()
            while (work := self._work) is not None:
                self._work = None
                try:
                    work()
                except BaseException as error:  # noqa: BLE001  # raised in the waiting thread
                    self._error.append(error)
                self._stop()
            restore(draws)
        if self._is_left and event.name not in ("run_failed", "run_closed"):
            raise LeftTraining

    def _is_wanted(self, run: Run, event: Event) -> bool:
        """Return whether to pause; also after an error of the function."""
        try:
            return self._wanted(run, event)
        except BaseException as error:  # noqa: BLE001  # raised in the waiting thread
            self._error.append(error)
            return True

    def _stop(self) -> None:
        with self._changed:
            self._state = "waiting"
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._state != "waiting" or self._is_left)
            self._state = "running"


def _was_left(error: Any) -> bool:
    """True if an error is, or was caused by, LeftTraining."""
    while error is not None:
        if isinstance(error, LeftTraining):
            return True
        error = error.__cause__
    return False
