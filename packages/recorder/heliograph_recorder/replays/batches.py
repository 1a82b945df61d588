"""Replay the training batches and the step boundaries of a recorded run."""

from __future__ import annotations

from typing import Final

from heliograph import BackwardEnd, BatchEnd, BatchStart, ForwardEnd, GradientsReady, ShouldStop, StepEnd
from heliograph.events import Event, Request, Verb

from ..format.records import Batches, Entry, EventEntry
from ..verbs import TAKEN_BACK
from .entries import BATCHES, ENDS, Entries
from .failure import RecordedFailure
from .report import ReplayFindings
from .requests import RecordedRequests
from .run import LOSSES, ReplayRun
from .stubs import UnrecordedAttribute

AT_BOUNDARIES: Final[tuple[Verb, ...]] = ("next_phase", "log", "validation", "save")  # in the order of the loop
CONTINUES: Final = (BATCHES, "epoch_start", "checkpoint_loaded")


class Boundary:
    """The step boundary at the current position, if it is open: which requests were served, and whether the run ends.

    Args:
        run: the replayed run.
        requests: the requests of plugins that are not replayed.
        findings: the collector of the results.
        failure: the failure of the recorded run.
        is_shared: whether there were several ranks; they serve a request of a single rank one boundary later.
    """

    def __init__(
        self,
        run: ReplayRun,
        requests: RecordedRequests,
        findings: ReplayFindings,
        failure: RecordedFailure,
        *,
        is_shared: bool,
    ) -> None:
        self._run, self._requests, self._findings, self._failure = run, requests, findings, failure
        self._should_stop = run.bus.signal(ShouldStop)
        self._is_shared = is_shared
        self._is_open = self._is_due = self._is_last = self._in_epoch = self._is_waiting = False
        self._served = -1  # the index of the last verb that was served or removed

    def open(self, *, due: bool, last: bool = False, in_epoch: bool = False) -> None:
        """Begin a boundary.

        Args:
            due: whether the loop has a boundary here, even if the recording shows no served request.
            last: whether the training is over.
            in_epoch: whether the boundary follows a batch.
        """
        self._is_open, self._is_due, self._is_last, self._in_epoch, self._served = True, due, last, in_epoch, -1

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
        self._findings.decide(verb, did=True)
        for taker, taken in TAKEN_BACK.items():
            if taken == verb:
                self._findings.decide(taker, did=False)

    def serve_change(self, change: Request) -> None:
        self._is_due = True
        self._run.own_control.remove(change.what)
        self._findings.decide_change(change, did=True)

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
        if not self._is_due or self._failure.interrupts_boundary(following):
            return
        name = following.event if isinstance(following, EventEntry) else BATCHES
        was_waiting, self._is_waiting = self._is_waiting, False
        if name == BATCHES and not was_waiting and self._waits():
            self._is_waiting = True
            self._emit_should_stop()
            self._run.own_control.adopt(self._run.own_control.open_requests(), vetoed=False)
            return
        self._remove_until(len(AT_BOUNDARIES))
        for taker, taken in TAKEN_BACK.items():
            is_done = {"stop": name not in ENDS, "end_epoch": name == BATCHES or None}.get(taken, True)
            self._findings.decide(taker, did=is_done)
        if not self._is_last:
            self._run.control.release()
            self._emit_should_stop()
            self._decide(name)

    def _waits(self) -> bool:
        """Return whether all open requests are of the recorded run, which did not serve them here.

        Then only some of its ranks had made them. Any other request is treated as a request of all ranks.
        """
        if not self._is_shared or not self._in_epoch or self._served >= 0:
            return False
        requests = self._run.own_control.open_requests().values()
        return bool(requests) and all(map(self._requests.was_made, requests))

    def _emit_should_stop(self) -> None:
        self._requests.add_votes()
        if self._should_stop.chain:
            with self._failure.limit_handlers(ShouldStop):
                self._should_stop.emit(self._run, ShouldStop())

    def _remove_until(self, end: int) -> None:
        """Remove the requests that the recorded run did not serve."""
        for change in self._run.own_control.pop_changes():
            self._findings.decide_change(change, did=False)
        for verb in AT_BOUNDARIES[self._served + 1 : end]:
            self._run.own_control.remove(verb)
            self._findings.decide(verb, did=None if verb == "next_phase" else False)

    def _decide(self, following: str) -> None:
        control = self._run.own_control
        stop = control.stop_request
        if stop is not None and not control.vetoed and not control.is_rolling_back:
            self._stop(stop, following)
        if following == BATCHES and control.should_end_epoch:
            control.remove("end_epoch")
            self._findings.decide("end_epoch", did=False)
        self._findings.decide("veto_stop", did=following not in ENDS)
        is_between_epochs = following == "epoch_start" and not self._run.progress.batch
        if is_between_epochs:
            self._findings.decide("end_epoch", did=None)
        control.decide(in_epoch=not is_between_epochs)

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
        self._findings.decide("stop", did=did)


Row = tuple[int, int, int, int, int, int, int]
UNREAD = UnrecordedAttribute("the losses here", LOSSES)


class BatchReplay:
    """Replay blocks of batches with the events of the loop, except events without handlers.

    Args:
        run: the replayed run.
        entries: the entries of the attempt.
        requests: the requests of plugins that are not replayed.
        boundary: the boundary after a batch.
        findings: the collector of the results.
        failure: the failure of the recorded run.
    """

    def __init__(
        self,
        run: ReplayRun,
        entries: Entries,
        requests: RecordedRequests,
        boundary: Boundary,
        findings: ReplayFindings,
        failure: RecordedFailure,
    ) -> None:
        self._run, self._entries, self._requests, self._boundary = run, entries, requests, boundary
        self._findings, self._failure = findings, failure
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
            block.tokens or (0,) * len(block),
            strict=True,
        )
        remaining, should_stop, batch = len(block), self._should_stop, self._batch
        losses = iter(block.losses or ())
        entries.in_block = True
        for row in rows:
            remaining -= 1
            if remaining:
                batch(row, next(losses, UNREAD))
            else:
                entries.in_block, run.is_last_seen = False, is_last
                with self._failure.limit_handlers(BatchEnd):
                    batch(row, next(losses, UNREAD))
            due = control.is_due(window=run.stepping.window, judged=bool(should_stop.chain))
            if not remaining:
                boundary.open(due=due, in_epoch=True)
            elif due:
                boundary.open(due=True, in_epoch=True)
                boundary.close(block)

    def _batch(self, row: Row, loss: float | UnrecordedAttribute) -> None:
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
        self._findings.decide("skip_batch", did=False)  # no effect after a skipped batch
        self._findings.decide("hold_step", did=self._run.stepping.window > 0)
        self._findings.decide("scale_loss", did=None)
        self._run.control.close_batch()

    def _add_requests(self, event: type[Event], batch: int) -> None:
        self._requests.add_before_in_batch(batch, event.name)

    def _move_to_end(self, block: Batches, *, is_last: bool) -> None:
        run, losses = self._run, block.losses or (UNREAD,)
        run.move_to(block.last)
        run.stepping.window, run.is_last_seen, run.loss = block.window[-1], is_last, losses[-1]
        self._requests.add_of_finished_batches()
        run.control.close_batch()
        self._boundary.open(due=run.control.is_due(window=run.stepping.window, judged=False), in_epoch=True)
