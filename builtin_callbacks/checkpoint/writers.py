"""How checkpoints are written: while the loop waits, or in the background; on several ranks by the main one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from ...core.distributed.ranks.failure import WorkOutcome, on_main, outcome_of, value_of_main, values_of_ranks
from ...events import BatchEnd, Engine, Handle, Lane, Run
from .background import BackgroundWorker
from .buffers import Buffers, sizes_of
from .weights_only import Capture

T = TypeVar("T")
WORTH_REPORTING = 0.1  # seconds that the loop was held up
logger = logging.getLogger("heliograph")


class Writer(Protocol):
    """What carries out the writing, which is the main rank's, and says on all ranks when it is done.

    On several ranks all methods but `close` are collectives, and `end` unless the rank has left the others.
    """

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""

    def begin(self, run: Run) -> None:
        """Prepare for a run."""

    def hold(self, run: Run, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the run's state, such that it can be written from now on; see `capture` for the shards."""

    def do(self, run: Run, work: Callable[[], T], then: Callable[[T], object], *, is_save: bool = True) -> None:
        """Do some work on the main rank; call `then` with its result, in the thread of the loop, when it is done.

        `is_save`: whether the run gets a note where this rank has to abandon it.
        """

    def do_on_each(self, run: Run, work: Callable[[], T], then: Callable[[list[T]], object]) -> None:
        """Do some work on every rank; call `then` with the results, by rank, when it is done everywhere."""

    def drain(self) -> None:
        """Wait until all work is done."""

    def end(self, run: Run) -> None:
        """Wait until all work is done, and note how it went, or what had to be abandoned without the other ranks."""

    def close(self) -> None:
        """Wait, and stop listening."""


class LoopWriter:
    """Writes at once, while the loop waits.

    Args:
        capture: returns the run's state, or what is saved of it.
    """

    is_idle = True

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def begin(self, run: Run) -> None:
        """Do nothing: there is nothing to prepare."""

    def hold(self, run: Run, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the live state: nothing changes it while it is written."""
        return self._capture(run, shards)

    def do(self, run: Run, work: Callable[[], T], then: Callable[[T], object], *, is_save: bool = True) -> None:
        """Do the work now."""
        then(on_main(run.engine, _watched(run, work)))

    def do_on_each(self, run: Run, work: Callable[[], T], then: Callable[[list[T]], object]) -> None:
        """Do the work now."""
        then(values_of_ranks(run.engine, outcome_of(_watched(run, work))))

    def drain(self) -> None:
        """Do nothing: all work is done."""

    def end(self, run: Run) -> None:
        """Do nothing: all work is done."""

    def close(self) -> None:
        """Do nothing: all work is done."""


class BackgroundWriter:
    """Copies the state into kept buffers, and writes it in the background; one write at a time.

    It listens to `BatchEnd` only while something is under way. On several ranks the main rank writes; meanwhile all
    ask wherever they agree, in one small vote, whether it is done, so that all are informed at the same step. Whether
    they vote goes by `_awaited` only, which is set and cleared by all at the same places.

    Args:
        capture: returns the run's state, or what is saved of it.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._worker, self._buffers = BackgroundWorker(), Buffers()
        self._handle: Handle | None = None
        self._engine: Engine | None = None
        self._awaited: Callable[[Any], object] | None = None  # what all ranks do when the work is done
        self._of_each = False  # whether the work is every rank's, not the main rank's
        self._is_save = True
        self._waits_for_step = self._reserving = False
        self._saves = self._held_up = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._worker.is_idle

    def begin(self, run: Run) -> None:
        """Reserve buffers for the weights; for the optimizer's state, too, as soon as the first step has made it."""
        self._saves, self._held_up, self._worker.waited = 0, 0, 0.0
        self._meet(run)
        if run.engine.is_main:
            self._reserve(self._capture.weights(run))
            self._waits_for_step = not self._capture.weights_only
        self._listen(run)

    def hold(self, run: Run, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a copy of the state, as soon as the former one is written."""
        self._meet(run)
        self._wait()
        self._saves += 1
        self._listen(run)
        state = self._capture(run, shards)
        return self._buffers.copy(state) if run.engine.is_main else state

    def do(self, run: Run, work: Callable[[], T], then: Callable[[T], object], *, is_save: bool = True) -> None:
        """Begin the work; `then` is called at the end of a later batch, at the next save, or at the end of the run."""
        work, self._is_save = self._prepared(run, work, of_each=False), is_save
        if self._engine is None:
            self._worker.submit(work, then)
            return
        self._awaited = then
        if self._engine.is_main:
            self._worker.submit(partial(outcome_of, work), self._report)

    def do_on_each(self, run: Run, work: Callable[[], T], then: Callable[[list[T]], object]) -> None:
        """Begin the work on every rank; `then` is called as after `do`."""
        work, self._is_save = self._prepared(run, work, of_each=True), True
        if self._engine is None:
            self._worker.submit(work, lambda result: then([result]))
            return
        self._awaited = then
        self._worker.submit(partial(outcome_of, work), self._report)

    def drain(self) -> None:
        """Wait until everything is written."""
        while self._listens_only:
            self._report(None)
        self._worker.drain()
        while self._listens_only:  # what came up meanwhile
            self._report(None)

    def end(self, run: Run) -> None:
        """Wait until everything is written; note how long the loop was held up, and what is abandoned."""
        if run.has_left_group and (lost := self._part()):
            run.note(lost)
        self.drain()
        if self._held_up:
            run.note(
                f"background saves: {self._held_up} of {self._saves} waited for the former one, "
                f"{self._worker.waited:.2f} s in all"
            )

    def close(self) -> None:
        """Wait, and stop listening."""
        self._part()
        try:
            self._worker.drain()
        finally:
            self._stop_listening()

    @property
    def _listens_only(self) -> bool:
        """Whether this rank waits for the main rank's work."""
        return self._engine is not None and not (self._engine.is_main or self._awaited is None or self._of_each)

    def _meet(self, run: Run) -> None:
        """Continue with the other ranks, if there are any."""
        is_shared = run.engine.world_size > 1 and not run.has_left_group
        self._engine = run.engine if is_shared else None

    def _prepared(self, run: Run, work: Callable[[], T], *, of_each: bool) -> Callable[[], T]:
        """Return the work as it is to be done, on every rank: all learn of its end together."""
        assert self._awaited is None
        self._meet(run)
        self._listen(run)
        self._of_each = of_each
        return _watched(run, work)

    def _let_go(self) -> None:
        """Wait for the shards of this rank: their group must not end under the thread that writes them."""
        if self._of_each:
            self._worker.wait()

    def _part(self) -> str:
        """Continue without the other ranks; return what that makes of a running save, where it is not reported here.

        Only the main rank reports what it writes, and no rank reports shards.
        """
        engine, then, self._engine = self._engine, self._awaited, None
        if engine is None or then is None or (engine.is_main and not self._of_each):
            return ""
        self._awaited = None
        self._worker.forget()
        if not self._is_save:
            return ""
        what = "is finished by the main rank, and not reported on this one"
        if self._of_each:
            what = "is abandoned: its shards are not a checkpoint without the other ranks"
        lost = f"the save under way {what}, as the run did not end on all ranks together"
        logger.warning(lost)
        return lost

    def _report(self, outcome: WorkOutcome[Any] | None) -> None:
        """Report what was done, on all ranks."""
        then, self._awaited = self._awaited, None
        assert then is not None
        if self._engine is None:
            assert outcome is not None
            then(outcome.value_or_raise())
        elif self._of_each:
            assert outcome is not None
            then(values_of_ranks(self._engine, outcome))
        else:
            then(value_of_main(self._engine, outcome))

    def _wait(self) -> None:
        before, waits_for_save = self._worker.waited, not self._reserving
        self.drain()
        seconds = self._worker.waited - before
        if seconds > WORTH_REPORTING and waits_for_save:
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
        run.when_leaving(self._let_go)
        if self._handle is None:
            self._handle = run.bus.on(BatchEnd, self._look, lane=Lane.PERSIST)

    def _stop_listening(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _look(self, run: Run, event: BatchEnd) -> None:
        """Take note of what was done meanwhile; stop listening when there is nothing to wait for."""
        if self._engine is None or self._awaited is None:
            self._worker.poll()
        elif run.ranks_meet and not self._engine.vote([float(not (self._listens_only or self._worker.is_done))])[0]:
            self._report(None) if self._listens_only else self._worker.poll()
        if self._waits_for_step and self.is_idle and not run.window and run.progress.steps > run.origin.steps:
            self._waits_for_step = False
            self._reserve(self._own_state(run))
        if self.is_idle and self._awaited is None and not self._waits_for_step:
            self._stop_listening()

    def _own_state(self, run: Run) -> Any:
        """Return what takes the room of a state; on several ranks without asking the others for theirs."""
        if self._engine is None:
            return self._capture(run)
        return [self._capture.weights(run), *(each.state_dict() for each in run.optimizers.values())]


def _watched(run: Run, work: Callable[[], T]) -> Callable[[], T]:
    """Return work during which this process is not ended, whatever becomes of the other ranks."""
    engine = run.engine

    def watched() -> T:
        with engine.writing():
            return work()

    return watched
