"""How checkpoints are written: while the loop waits, or beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from ...events import BatchEnd, Handle, Lane, Run
from .background import BackgroundWorker, nothing
from .buffers import Buffers, sizes_of

T = TypeVar("T")
WORTH_TELLING = 0.1  # seconds that the loop was held up
logger = logging.getLogger("heliograph")


class Writer(Protocol):
    """What carries out the writing, and says when it is done."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""

    def begin(self, run: Run) -> None:
        """Prepare for a run."""

    def hold(self, run: Run) -> dict[str, Any]:
        """Return the run's state, such that it can be written from now on."""

    def do(self, work: Callable[[], T], then: Callable[[T], object] = nothing) -> None:
        """Do some work; call `then` with its result, in the thread of the loop, when it is done."""

    def drain(self) -> None:
        """Wait until all work is done."""

    def end(self, run: Run) -> None:
        """Wait until all work is done, and note how it went."""

    def close(self) -> None:
        """Wait, and stop listening."""


class LoopWriter:
    """Writes at once, while the loop waits."""

    is_idle = True

    def begin(self, run: Run) -> None:
        """Do nothing: there is nothing to prepare."""

    def hold(self, run: Run) -> dict[str, Any]:
        """Return the live state: nothing changes it while it is written."""
        return run.state_dict()

    def do(self, work: Callable[[], T], then: Callable[[T], object] = nothing) -> None:
        """Do the work now."""
        then(work())

    def drain(self) -> None:
        """Do nothing: all work is done."""

    def end(self, run: Run) -> None:
        """Do nothing: all work is done."""

    def close(self) -> None:
        """Do nothing: all work is done."""


class BackgroundWriter:
    """Copies the state into kept buffers, and writes it beside the loop; one write at a time.

    It listens to `BatchEnd` only while something is under way.
    """

    def __init__(self) -> None:
        self._worker, self._buffers = BackgroundWorker(), Buffers()
        self._handle: Handle | None = None
        self._waits_for_step = self._reserving = False
        self._saves = self._held_up = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._worker.is_idle

    def begin(self, run: Run) -> None:
        """Reserve buffers for the weights; for the optimizer's state, too, as soon as the first step has made it."""
        self._saves, self._held_up, self._worker.waited = 0, 0, 0.0
        self._reserve({name: module.state_dict() for name, module in run.modules.items()})
        self._waits_for_step = True
        self._listen(run)

    def hold(self, run: Run) -> dict[str, Any]:
        """Return a copy of the state, as soon as the former one is written."""
        self._wait()
        self._saves += 1
        self._listen(run)
        return self._buffers.copy(run.state_dict())

    def do(self, work: Callable[[], T], then: Callable[[T], object] = nothing) -> None:
        """Begin the work; `then` is called at the end of a later batch, at the next save, or at the end of the run."""
        self._worker.submit(work, then)

    def drain(self) -> None:
        """Wait until everything is written."""
        self._worker.drain()

    def end(self, run: Run) -> None:
        """Wait until everything is written; note how long the loop was held up."""
        self._worker.drain()
        if self._held_up:
            run.note(
                f"background saves: {self._held_up} of {self._saves} waited for the former one, "
                f"{self._worker.waited:.2f} s in all"
            )

    def close(self) -> None:
        """Wait, and stop listening."""
        try:
            self._worker.drain()
        finally:
            self._stop_listening()

    def _wait(self) -> None:
        before, waits_for_save = self._worker.waited, not self._reserving
        self._worker.drain()
        seconds = self._worker.waited - before
        if seconds > WORTH_TELLING and waits_for_save:
            self._held_up += 1
            if self._held_up == 1:
                logger.warning("a save waited %.2f s for the former one, which was still being written", seconds)

    def _reserve(self, state: Any) -> None:
        self._reserving = True
        self._worker.submit(partial(self._buffers.reserve, sizes_of(state)), self._reserved)

    def _reserved(self, done: None) -> None:
        self._reserving = False

    def _listen(self, run: Run) -> None:
        run.when_settling(self.drain)
        if self._handle is None:
            self._handle = run.bus.on(BatchEnd, self._look, lane=Lane.PERSIST)

    def _stop_listening(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _look(self, run: Run, event: BatchEnd) -> None:
        """Take note of what was done meanwhile; stop listening when there is nothing to wait for."""
        self._worker.poll()
        if self._waits_for_step and self.is_idle and not run.window and run.progress.steps > run.origin.steps:
            self._waits_for_step = False
            self._reserve(run.state_dict())
        if self.is_idle and not self._waits_for_step:
            self._stop_listening()
