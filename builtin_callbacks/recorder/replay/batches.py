"""The events of every batch, made anew from the counters behind each."""

from __future__ import annotations

from ....core.loop import BATCH_END, BATCH_START, GRADIENTS_READY, STEP_END
from ....events import BatchEnd, BatchStart, Event, GradientsReady, ShouldStop, StepEnd
from ..format.records import Batches
from .boundary import Boundary
from .failure import Failing
from .ledger import Ledger
from .requests import Requests
from .run import LOSSES, ReplayRun
from .script import Script
from .stand_ins import Unheld

Row = tuple[int, int, int, int, int, int]
UNREAD = Unheld("the losses here", LOSSES)


class BatchReplay:
    """Replays blocks of batches, event for event as the loop emits them; what nobody hears is passed over.

    Args:
        run: the run.
        script: the attempt.
        requests: those of plugins that are not replayed.
        boundary: the boundary behind a batch.
        ledger: where to write down what becomes of the requests.
        failing: how the run failed, if it did.
    """

    def __init__(
        self,
        run: ReplayRun,
        script: Script,
        requests: Requests,
        boundary: Boundary,
        ledger: Ledger,
        failing: Failing,
    ) -> None:
        self._run, self._script, self._requests, self._boundary = run, script, requests, boundary
        self._ledger, self._failing = ledger, failing
        bus = run.bus
        self._batch_start, self._gradients_ready = bus.signal(BatchStart), bus.signal(GradientsReady)
        self._step_end, self._batch_end = bus.signal(StepEnd), bus.signal(BatchEnd)
        self._should_stop = bus.signal(ShouldStop)

    def replay(self, block: Batches) -> None:
        """Replay a block; the boundary behind its last batch stays open."""
        self._requests.gather()
        is_last = self._script.ends_epoch()
        signals = (self._batch_start, self._gradients_ready, self._step_end, self._batch_end, self._should_stop)
        if any(signal.chain for signal in signals) or self._run.control.pending:
            self._replay_each(block, is_last=is_last)
        else:
            self._pass_over(block, is_last=is_last)

    def _replay_each(self, block: Batches, *, is_last: bool) -> None:
        run, control, script, boundary = self._run, self._run.control, self._script, self._boundary
        rows = zip(
            block.steps,
            block.skipped_steps,
            block.skipped_batches,
            block.samples,
            block.window,
            block.centiseconds,
            strict=True,
        )
        left, should_stop, batch = len(block), self._should_stop, self._batch
        losses = iter(block.losses or ())
        script.amid = True
        for row in rows:
            left -= 1
            if not left:
                script.amid, run.last_seen = False, is_last
            if left:
                batch(row, next(losses, UNREAD))
            else:
                with self._failing.heard(BatchEnd):
                    batch(row, next(losses, UNREAD))
            due = (control.pending or bool(should_stop.chain)) and (not run.window or control.is_rolling_back)
            if not left:
                boundary.open(due=due)
            elif due:
                boundary.open(due=True)
                boundary.close(block)

    def _batch(self, row: Row, loss: float | Unheld) -> None:
        """Replay one batch: each counter rises where the loop raises it."""
        run, control, progress = self._run, self._run.control, self._run.progress
        steps, skipped_steps, skipped_batches, samples, window, centiseconds = row
        run.in_hand = True
        if self._requests.waiting:
            self._bring(BatchStart, progress.batch + 1)
        if self._batch_start.chain:
            self._batch_start.emit(run, BATCH_START)
        if skipped_batches > progress.skipped_batches:
            progress.skipped_batches = skipped_batches
            self._ledger.settle("skip_batch", did=True)
        else:
            progress.samples, run.loss = samples, loss
            run.window += 1
        if steps > progress.steps or skipped_steps > progress.skipped_steps:
            self.close_window(steps, skipped_steps)
        run.window = window
        progress.batch += 1
        run.in_hand = False
        progress.set_seconds(centiseconds / 100)
        if self._requests.waiting:
            self._bring(BatchEnd, progress.batch)
        if self._batch_end.chain:
            self._batch_end.emit(run, BATCH_END)
        if self._requests.waiting:
            self._requests.bring_past()
        if control.touched:
            self._settle()

    def close_window(self, steps: int, skipped_steps: int) -> None:
        """Replay the end of a window: its step, or its drop."""
        run, control, progress = self._run, self._run.control, self._run.progress
        if self._requests.waiting:
            self._bring(GradientsReady, progress.batch + 1)
        if self._gradients_ready.chain:
            self._gradients_ready.emit(run, GRADIENTS_READY)
        if control.touched:
            self._ledger.settle("skip_step", did=skipped_steps > progress.skipped_steps)
        progress.skipped_steps = skipped_steps
        if steps > progress.steps:
            progress.steps = steps
            if self._requests.waiting:
                self._bring(StepEnd, progress.batch + 1)
            if self._step_end.chain:
                self._step_end.emit(run, STEP_END)
        run.window = 0

    def _settle(self) -> None:
        """Close what was asked about a batch."""
        self._ledger.settle("skip_batch", did=False)  # unless that is settled
        self._ledger.settle("hold_step", did=self._run.window > 0)
        self._ledger.settle("scale_loss", did=None)
        self._run.control.close_batch()

    def _bring(self, event: type[Event], batch: int) -> None:
        self._requests.bring_of_batch(self._run.progress.epoch, batch, event.name)

    def _pass_over(self, block: Batches, *, is_last: bool) -> None:
        """Go behind a block at once."""
        run, losses = self._run, block.losses or (UNREAD,)
        run.move(block.last)
        run.window, run.last_seen, run.loss = block.window[-1], is_last, losses[-1]
        self._requests.bring_past()
        run.control.close_batch()
        self._boundary.open(due=run.control.pending and (not run.window or run.control.is_rolling_back))
