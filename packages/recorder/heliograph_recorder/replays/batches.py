"""The training batches of a recorded run: their events, from the counters after each."""

from __future__ import annotations

from heliograph import BackwardEnd, BatchEnd, BatchStart, ForwardEnd, GradientsReady, ShouldStop, StepEnd
from heliograph.events import Event

from ..format.records import Batches
from .boundary import Boundary
from .entries import Entries
from .failure import RecordedFailure
from .findings import Findings
from .requests import RecordedRequests
from .run import LOSSES, ReplayRun
from .stubs import Unrecorded

Row = tuple[int, int, int, int, int, int, int]
UNREAD = Unrecorded("the losses here", LOSSES)


class BatchReplay:
    """Replays blocks of batches: the same events as in the loop, except those that have no handlers.

    Args:
        run: the run.
        entries: the entries of the attempt.
        requests: those of plugins that are not replayed.
        boundary: the boundary after a batch.
        findings: where to note which requests were served.
        failure: how the run failed, if it did.
    """

    def __init__(
        self,
        run: ReplayRun,
        entries: Entries,
        requests: RecordedRequests,
        boundary: Boundary,
        findings: Findings,
        failure: RecordedFailure,
    ) -> None:
        self._run, self._entries, self._requests, self._boundary = run, entries, requests, boundary
        self._findings, self._failure = findings, failure
        bus = run.bus
        self._batch_start, self._gradients_ready = bus.signal(BatchStart), bus.signal(GradientsReady)
        self._forward_end, self._backward_end = bus.signal(ForwardEnd), bus.signal(BackwardEnd)
        self._step_end, self._batch_end = bus.signal(StepEnd), bus.signal(BatchEnd)
        self._should_stop = bus.signal(ShouldStop)

    def replay(self, block: Batches) -> None:
        self._requests.collect()
        is_last = self._entries.ends_epoch()
        signals = (
            self._batch_start,
            self._forward_end,
            self._backward_end,
            self._gradients_ready,
            self._step_end,
            self._batch_end,
            self._should_stop,
        )
        if any(signal.chain for signal in signals) or self._run.control.pending:
            self._replay_each(block, is_last=is_last)
        else:
            self._skip_to_end(block, is_last=is_last)

    def _replay_each(self, block: Batches, *, is_last: bool) -> None:
        run, control, entries, boundary = self._run, self._run.control, self._entries, self._boundary
        rows = zip(
            block.steps,
            block.skipped_steps,
            block.skipped_batches,
            block.samples,
            block.window,
            block.centiseconds,
            block.tokens or (0,) * len(block),
            strict=True,
        )
        left, should_stop, batch = len(block), self._should_stop, self._batch
        losses = iter(block.losses or ())
        entries.in_block = True
        for row in rows:
            left -= 1
            if left:
                batch(row, next(losses, UNREAD))
            else:
                entries.in_block, run.is_last_seen = False, is_last
                with self._failure.limit_handlers(BatchEnd):
                    batch(row, next(losses, UNREAD))
            due = control.is_due(window=run.stepping.window, judged=bool(should_stop.chain))
            if not left:
                boundary.open(due=due, in_epoch=True)
            elif due:
                boundary.open(due=True, in_epoch=True)
                boundary.close(block)

    def _batch(self, row: Row, loss: float | Unrecorded) -> None:
        run, control, progress = self._run, self._run.control, self._run.progress
        steps, skipped_steps, skipped_batches, samples, window, centiseconds, tokens = row
        run.data.in_hand = True
        if self._requests.waiting:
            self._add_requests(BatchStart, progress.batch + 1)
        if self._batch_start.chain:
            self._batch_start.emit(run, BatchStart())
        if skipped_batches > progress.skipped_batches:
            progress.skipped_batches = skipped_batches
            self._findings.decide("skip_batch", did=True)
        else:
            progress.samples, run.loss = samples, loss
            self._replay_passes()
        progress.tokens = tokens
        if steps > progress.steps or skipped_steps > progress.skipped_steps:
            self.close_window(steps, skipped_steps)
        run.stepping.window = window
        progress.batch += 1
        run.data.in_hand = False
        progress.set_seconds(centiseconds / 100)
        if self._requests.waiting:
            self._add_requests(BatchEnd, progress.batch)
        if self._batch_end.chain:
            self._batch_end.emit(run, BatchEnd())
        if self._requests.waiting:
            self._requests.add_of_finished_batches()
        if control.touched:
            self._close_requests()

    def _replay_passes(self) -> None:
        run = self._run
        if self._requests.waiting:
            self._add_requests(ForwardEnd, run.progress.batch + 1)
        if self._forward_end.chain:
            self._forward_end.emit(run, ForwardEnd())
        run.stepping.window += 1
        if self._requests.waiting:
            self._add_requests(BackwardEnd, run.progress.batch + 1)
        if self._backward_end.chain:
            self._backward_end.emit(run, BackwardEnd())

    def close_window(self, steps: int, skipped_steps: int) -> None:
        run, control, progress = self._run, self._run.control, self._run.progress
        if self._requests.waiting:
            self._add_requests(GradientsReady, progress.batch + 1)
        if self._gradients_ready.chain:
            self._gradients_ready.emit(run, GradientsReady())
        if control.touched:
            self._findings.decide("skip_step", did=skipped_steps > progress.skipped_steps)
        progress.skipped_steps = skipped_steps
        if steps > progress.steps:
            progress.steps = steps
            if self._requests.waiting:
                self._add_requests(StepEnd, progress.batch + 1)
            if self._step_end.chain:
                self._step_end.emit(run, StepEnd())
        run.stepping.window = 0

    def _close_requests(self) -> None:
        self._findings.decide("skip_batch", did=False)  # unless it was skipped, which is noted already
        self._findings.decide("hold_step", did=self._run.stepping.window > 0)
        self._findings.decide("scale_loss", did=None)
        self._run.control.close_batch()

    def _add_requests(self, event: type[Event], batch: int) -> None:
        self._requests.add_before_in_batch(batch, event.name)

    def _skip_to_end(self, block: Batches, *, is_last: bool) -> None:
        run, losses = self._run, block.losses or (UNREAD,)
        run.move_to(block.last)
        run.stepping.window, run.is_last_seen, run.loss = block.window[-1], is_last, losses[-1]
        self._requests.add_of_finished_batches()
        run.control.close_batch()
        self._boundary.open(due=run.control.is_due(window=run.stepping.window, judged=False), in_epoch=True)
