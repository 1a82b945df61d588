"""A training in a thread of its own, which stops at events and waits."""

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
    """Ends a training that nobody wants to continue."""


class PausedThread:
    """Trains in a thread, from one wanted event to the next; whoever looks at the training does so in another one.

    What is drawn from the global random generators while the training waits, it does not notice.

    Args:
        train: trains; called in the thread.

    Attributes:
        run: the run, None before its first event.
        event: the event at which the training waits, after all other handlers; None when it does not.
        result: what the training returned, None before its end.
    """

    def __init__(self, train: Callable[[], RunResult]) -> None:
        self.run: Run | None = None
        self.event: Event | None = None
        self.result: RunResult | None = None
        self._train, self._error = train, list[BaseException]()
        self._wanted: Wanted = _never
        self._work: Callable[[], object] | None = None  # what is to be called in the thread
        self._state: Literal["new", "running", "waiting", "ended"] = "new"
        self._changed = Condition()
        self._is_left = False
        context = contextvars.copy_context()
        self._thread = Thread(target=lambda: context.run(self._run), name="heliograph-rerun", daemon=True)

    def subscribe(self, bus: Bus, *, left_out: Collection[str], recorder: str) -> None:
        """Handle all events of a bus, after all other handlers.

        `Log` is handled only while others handle it: where nobody does, the loop collects no losses for it.

        Args:
            bus: of the training.
            left_out: the names of plugins that are disabled here, and were not in the recorded run.
            recorder: the name of the plugin that handles `Log` only while others do, too.
        """
        handles = {
            event: bus.on(event, self._handle, lane=Lane.REPORT)
            for event in dict.fromkeys([*CATALOGUE, *(signal.event for signal in bus.signals())])
        }
        signal, own = bus.signal(Log), (describe(self._handle), recorder)

        def follow(run: Run | None, event: PluginChanged | None) -> None:  # noqa: ARG001  # the form of handlers
            others = [each for each in signal.subscriptions.values() if each.owner not in own]
            is_handled = any(not each.paused or each.owner in left_out for each in others)
            (handles[Log].resume if is_handled else handles[Log].pause)()

        follow(None, None)
        before_all = Subscription((Lane.TRANSFORM, -3), FunctionName(describe(follow)))
        bus.signal(PluginChanged).connect(follow, weak=False, subscription=before_all)

    def go_to(self, wanted: Wanted) -> bool:
        """Train until an event is wanted; return whether one was: the training may end before.

        Raises:
            RuntimeError: the training has ended.
            BaseException: the training failed, or `wanted` did, and the training waits where it was called;
                KeyboardInterrupt lets it wait at its next event.
        """
        self._wait()
        if self._state == "ended":
            raise RuntimeError("The training has ended, so it does not continue.")
        self._wanted, self.event = wanted, None
        try:
            if self._state == "new":
                self._state = "running"
                self._thread.start()
            else:
                self._continue()
            self._wait()
        except KeyboardInterrupt:  # wherever it comes, or the training would not stop at its next event
            self._wanted = _always
            raise
        if self._error:
            raise self._error.pop()
        return self.event is not None

    def call(self, work: Callable[[], object]) -> None:
        """Call a function in the thread of the training, which waits at an event.

        Raises:
            RuntimeError: the training does not wait.
            BaseException: the function failed.
        """
        if self._state != "waiting":
            raise RuntimeError("The training does not wait at an event, so nothing can be called in its thread.")
        self._work = work
        self._continue()
        self._wait()
        if self._error:
            raise self._error.pop()

    def close(self) -> None:
        """Leave the training where it is; closing twice does nothing.

        Raises:
            BaseException: it failed otherwise than by that.
        """
        self._is_left = True
        if self._state == "waiting":
            self._continue()
        if self._thread.ident is not None:
            with self._changed:  # `wait_for` gives the lock back whole, also where a Ctrl-C has left it held
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
        """Wait until the training waits, or has ended."""
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._state != "running")
        except KeyboardInterrupt:
            self._wanted = _always
            raise

    # In the thread.

    def _run(self) -> None:
        try:
            self.result = self._train()
        except BaseException as error:  # noqa: BLE001  # it is raised where the training is waited for
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
                except BaseException as error:  # noqa: BLE001  # it is raised where the function was given
                    self._error.append(error)
                self._stop()
            restore(draws)
        if self._is_left and event.name not in ("run_failed", "run_closed"):
            raise LeftTraining

    def _is_wanted(self, run: Run, event: Event) -> bool:
        """Return whether to wait here; where the function that knows it fails, too."""
        try:
            return self._wanted(run, event)
        except BaseException as error:  # noqa: BLE001  # it is raised where the function was given
            self._error.append(error)
            return True

    def _stop(self) -> None:
        with self._changed:
            self._state = "waiting"
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._state != "waiting" or self._is_left)
            self._state = "running"


def _never(run: Run, event: Event) -> bool:  # noqa: ARG001  # as `Wanted` is
    return False


def _always(run: Run, event: Event) -> bool:  # noqa: ARG001
    return True


def _was_left(error: Any) -> bool:
    """Return whether an error is that of a training that was left, or was made of it."""
    while error is not None:
        if isinstance(error, LeftTraining):
            return True
        error = error.__cause__
    return False
