"""Replay the training batches and the step boundaries of a recorded run."""

from __future__ import annotations

from typing import Any, Final

from heliograph import BackwardEnd, BatchEnd, BatchStart, ForwardEnd, GradientsReady, ShouldStop, StepEnd
from heliograph.events import Event, Request, Verb

from ..format.records import Batches, Entry, EventEntry
from .entries import BATCHES, ENDS, Entries, RecordedRequests
from .report import ReplayFindings
from .run import UNREAD, ReplayRun

AT_BOUNDARIES: Final[tuple[Verb, ...]] = ("next_phase", "log", "validation", "save")  # in the order of the loop
CONTINUES: Final = (BATCHES, "epoch_start", "checkpoint_loaded")


class Boundary:
    """The step boundary at the current position, if it is open: which requests were served, and whether the run ends.

    Args:
        run: the replayed run.
        requests: the requests of plugins that are not replayed.
        findings: the collector of the results.
    """

    def __init__(self, run: ReplayRun, requests: RecordedRequests, findings: ReplayFindings) -> None:
        self._run, self._requests, self._findings = run, requests, findings
        self._should_stop = run.bus.signal(ShouldStop)
        self._is_open = self._is_due = self._is_last = False
        self._served = -1  # the index of the last verb that was served or removed

    def open(self, *, due: bool, last: bool = False) -> None:
        """Begin a boundary.

        Args:
            due: whether the loop has a boundary here, even if the recording shows no served request.
            last: whether the training is over.
        """
        self._is_open, self._is_due, self._is_last, self._served = True, due, last, -1

    def serve(self, verb: Verb) -> None:
        """Note that the recorded run served a request, but not the requests that precede it in a boundary."""
        if self._is_open:
            index = AT_BOUNDARIES.index(verb)
            if index <= self._served:  # after the training, everything is served twice
                self._remove_until(len(AT_BOUNDARIES))
                self._served = -1
            self._remove_until(index)
            self._served, self._is_due = index, True
        self._run.control.pop_request(verb)

    def serve_change(self, change: Request) -> None:
        self._is_due = True
        self._run.own_control.remove(change.what)

    def close(self, following: Entry | None) -> None:
        """End the boundary; `following` is the next milestone, None if the run was killed."""
        if not self._is_open:
            return
        self._is_open = False
        if following is None:
            stop = self._run.control.stop_request
            if stop is not None and not self._is_last:  # whether it was postponed is unknown
                self._add_end(stop, did=None)
            return
        name = following.event if isinstance(following, EventEntry) else BATCHES
        if not self._is_due or name == "run_failed":
            return
        self._remove_until(len(AT_BOUNDARIES))
        if not self._is_last:
            self._run.control.release()
            self._requests.add_votes()
            if self._should_stop.chain:
                self._should_stop.emit(self._run, ShouldStop())
            self._decide(name)

    def _remove_until(self, end: int) -> None:
        """Remove the requests that the recorded run did not serve."""
        self._run.own_control.pop_changes()
        for verb in AT_BOUNDARIES[self._served + 1 : end]:
            self._run.own_control.remove(verb)

    def _decide(self, following: str) -> None:
        control = self._run.own_control
        stop = control.stop_request
        if stop is not None and not control.vetoed and not control.is_rolling_back:
            self._stop(stop, following)
        if following == BATCHES and control.should_end_epoch:
            control.remove("end_epoch")
        control.decide(in_epoch=following == BATCHES or self._run.progress.batch > 0)

    def _stop(self, stop: Request, following: str) -> None:
        """Note the end of the run, unless a plugin that is not replayed postponed the stop."""
        requests = self._requests
        if following == "epoch_start" and self._run.epoch_is_over:  # the boundary of EpochEnd follows
            return
        if following in CONTINUES and requests.has_stop and requests.has_veto:
            self._run.own_control.postpone_stop()
            return
        if following in (*CONTINUES, *ENDS):
            self._add_end(stop, did=following in ENDS)
        if following in CONTINUES:
            self._run.own_control.remove("stop")

    def _add_end(self, stop: Request, *, did: bool | None) -> None:
        progress = self._run.progress
        place = progress.epoch, progress.batch, progress.steps
        self._findings.add_end(stop.by, stop.reason, place, did=did, failure=False)


Row = tuple[int, int, int, int, int, int, int]


class BatchReplay:
    """Replay blocks of batches with the events of the loop, except events without handlers.

    Args:
        run: the replayed run.
        entries: the entries of the attempt.
        requests: the requests of plugins that are not replayed.
        boundary: the boundary after a batch.
    """

    def __init__(self, run: ReplayRun, entries: Entries, requests: RecordedRequests, boundary: Boundary) -> None:
        self._run, self._entries, self._requests, self._boundary = run, entries, requests, boundary
        bus = run.bus
        kinds = BatchStart, ForwardEnd, BackwardEnd, GradientsReady, StepEnd, BatchEnd, ShouldStop
        self._signals = [bus.signal(kind) for kind in kinds]
        (
            self._batch_start, self._forward_end, self._backward_end, self._gradients_ready, self._step_end,
            self._batch_end, self._should_stop,
        ) = self._signals  # fmt: skip

    def replay(self, block: Batches) -> None:
        """Replay a block; the boundary after its last batch stays open."""
        self._requests.collect()
        is_last = self._entries.ends_epoch()
        if any(signal.chain for signal in self._signals) or self._run.control.pending:
            self._replay_batches(block, is_last=is_last)
        else:
            self._move_to_end(block, is_last=is_last)

    def _replay_batches(self, block: Batches, *, is_last: bool) -> None:
        run, control, entries, boundary = self._run, self._run.control, self._entries, self._boundary
        rows = zip(
            block.steps,
            block.skipped_steps,
            block.skipped_batches,
            block.samples,
            block.window,
            block.centiseconds,
            block.tokens,
            strict=True,
        )
        remaining, should_stop, batch = len(block), self._should_stop, self._batch
        losses = iter(block.losses or ())
        entries.in_block = True
        for row in rows:
            remaining -= 1
            if not remaining:
                entries.in_block, run.is_last_seen = False, is_last
            batch(row, next(losses, UNREAD))
            due = control.is_due(window=run.stepping.window, judged=bool(should_stop.chain))
            boundary.open(due=due)
            if remaining:
                boundary.close(block)

    def _batch(self, row: Row, loss: Any) -> None:
        run, control, progress = self._run, self._run.control, self._run.progress
        steps, skipped_steps, skipped_batches, samples, window, centiseconds, tokens = row
        run.data.in_hand = True
        if self._requests.waiting:
            self._add_requests(BatchStart, progress.batch + 1)
        if self._batch_start.chain:
            self._batch_start.emit(run, BatchStart())
        if skipped_batches > progress.skipped_batches:
            progress.skipped_batches = skipped_batches
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
            control.close_batch()

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
        run, progress = self._run, self._run.progress
        if self._requests.waiting:
            self._add_requests(GradientsReady, progress.batch + 1)
        if self._gradients_ready.chain:
            self._gradients_ready.emit(run, GradientsReady())
        progress.skipped_steps = skipped_steps
        if steps > progress.steps:
            progress.steps = steps
            if self._requests.waiting:
                self._add_requests(StepEnd, progress.batch + 1)
            if self._step_end.chain:
                self._step_end.emit(run, StepEnd())
        run.stepping.window = 0

    def _add_requests(self, event: type[Event], batch: int) -> None:
        self._requests.add_before_in_batch(batch, event.name)

    def _move_to_end(self, block: Batches, *, is_last: bool) -> None:
        run, losses = self._run, block.losses or (UNREAD,)
        run.move_to(block.last)
        run.stepping.window, run.is_last_seen, run.loss = block.window[-1], is_last, losses[-1]
        self._requests.add_of_finished_batches()
        run.control.close_batch()
        self._boundary.open(due=run.control.is_due(window=run.stepping.window, judged=False))
