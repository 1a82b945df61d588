"""The moments of a step boundary in the loop of a host: what is asked for and decided, and what the host does there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from heliograph import Bus, CheckpointSaved, Lane, Run, SavePoint, ShouldStop
from heliograph import events as ev
from heliograph.core.loop import publish
from heliograph.core.metrics.means import Means
from heliograph.spi import Metrics

from .batches import BatchMoments, closes_on_error

LOSS = "train/loss"


class Leave(NamedTuple):
    """What a boundary has decided.

    Attributes:
        stop: whether the training ends here.
        end_epoch: whether the epoch ends here.
    """

    stop: bool = False
    end_epoch: bool = False


NOTHING, STAY = frozenset[str](), Leave()


class BoundaryMoments(BatchMoments):
    """The moments of a step boundary; see `HostedTraining`."""

    _saving: tuple[Path | None, bool] | None = None
    _means: Means | None = None
    _is_served = False
    _samples_logged = 0  # of which the loss was logged

    @closes_on_error
    def open_boundary(self) -> frozenset[str]:
        """Let the ranks agree on what was asked for; return what the host is to do, of `log`, `validation`, `save`."""
        run = self.active
        if run.phase != "train":
            self.leave_validation()
        run.boundary_is_open, control = True, run.control
        control.agree()
        if not control.pending:
            return NOTHING
        asked = {"log": control.should_log, "validation": control.should_validate, "save": control.should_save}
        return frozenset(verb for verb, is_asked in asked.items() if is_asked)

    @closes_on_error
    def serve(self, actions: Mapping[str, Callable[[], object]]) -> None:
        """Open a boundary and do what is due, also what one of the actions made due that comes after it.

        Args:
            actions: what the host does for `log`, `validation` and `save`, in this order.
        """
        due = self.open_boundary()
        if not due:
            return
        for verb, act in actions.items():
            if verb in due:
                act()
                due = self.open_boundary()

    @closes_on_error
    def close_boundary(self) -> Leave:
        """Give the last word to handlers of `ShouldStop`, and decide; once the host has done what is due."""
        run = self.active
        control, should_stop = run.control, run.hot.should_stop
        has_news = control.pending or self._is_served or control.is_shared
        if not (has_news or should_stop.chain or run.checkpoints.in_boundary):  # nothing to decide, as at most steps
            run.boundary_is_open = False
            return STAY
        if run.checkpoints.in_boundary:  # of a resumed run: its state was saved here
            run.checkpoints.in_boundary = False
            control.release()
        if should_stop.chain:
            should_stop.emit(run, ShouldStop())
        control.decide(served=self._is_served, in_epoch=run.work.has_begun)
        self._is_served = run.boundary_is_open = False
        return Leave(control.stopped, control.should_end_epoch)

    @closes_on_error
    def log(self, metrics: Mapping[str, float], *, with_tracked: bool = True) -> None:
        """Log what the host logs, and what plugins track; on several ranks a collective.

        Args:
            metrics: by our names. `train/loss` is the mean over the samples since it was last logged.
            with_tracked: False for what is logged on some ranks only, or within a batch: no collective then, and what
                plugins asked for is still due.
        """
        run = self.active
        tracked: dict[str, float] = {}
        weights: dict[str, float] = {}
        if with_tracked:
            self._serve("log")
            tracked, weights = run.means.read("train"), dict(run.means.weights)
        if LOSS in metrics and (samples := run.progress.samples - self._samples_logged):
            self._samples_logged += samples
            weights[LOSS] = samples
            if LOSS not in tracked:  # else it is in the totals
                total, weight = run.means.totals.get("loss", (0.0, 0.0))
                run.means.totals = {**run.means.totals, "loss": (total + metrics[LOSS] * samples, weight + samples)}
        publish(run, ev.Log(Metrics({**tracked, **metrics}), weights))

    @closes_on_error
    def begin_validation(self, batches: int | None = None) -> None:
        """Begin a validation, whose modules are in eval mode, or about to be.

        Args:
            batches: how many, of all sets together; None where that is unknown.
        """
        run = self.active
        self.leave_validation()
        self._serve("validation")
        run.phase, run.progress.evaluated, run.data.evaluation_batches = "validation", 0, batches
        self._means = run.means
        del run.means  # new ones are made when they are used
        run.emit(ev.ValidationStart())

    @closes_on_error
    def begin_validation_batch(self, batch: Any, dataset: str = "") -> None:
        """Begin a batch of a validation set, which has an empty name where it is the only one."""
        run = self.active
        signal = run.bus.signal(ev.ValidationBatchStart)
        run.work.batch = batch
        if signal.chain:
            signal.emit(run, ev.ValidationBatchStart(dataset))

    @closes_on_error
    def end_validation_batch(self, dataset: str = "") -> None:
        """End a batch of a validation set."""
        run = self.active
        signal = run.bus.signal(ev.ValidationBatchEnd)
        run.progress.evaluated += 1
        if signal.chain:
            signal.emit(run, ev.ValidationBatchEnd(dataset))
        run.work.batch = None

    @closes_on_error
    def end_validation(self, metrics: Mapping[str, float]) -> None:
        """End a validation; on several ranks a collective where plugins track values in it.

        Args:
            metrics: by our names, such as `validation/loss`, or `validation/<set>/loss` of a named set.
        """
        run = self.active
        tracked = run.means.read("validation")
        publish(run, ev.ValidationEnd(Metrics({**tracked, **metrics})))
        assert self._means is not None
        run.phase, run.means, self._means = "train", self._means, None
        run.progress.validations += 1

    def leave_validation(self) -> None:
        """End a validation that the host has left without its end, because of an error that somebody took, say."""
        run = self.active
        if self._means is not None:
            means, self._means = self._means, None
            run.emit(ev.ValidationCut(f"{run.host.name} left it without its end"))
            run.phase, run.means = "train", means

    def stop_by_host(self, reason: str) -> None:
        """Note that the host ends the training before its length, and no plugin has asked for that."""
        run = self.active
        if not (run.is_complete or run.control.stopped):
            run.control.stop(reason, by=run.host.name)
            run.control.decide()

    @closes_on_error
    def save(self, path: Path | None, *, is_best: bool = False) -> None:
        """Say that the host has written a checkpoint, which holds our state.

        Args:
            path: its file or folder; None where the host does not say, and then no checkpoint is announced.
            is_best: whether it is the best so far, by the host's own measure.
        """
        run = self.active
        self._serve("save")
        self._saving = path, is_best
        with run.report.saving():
            run.emit(ev.SavePoint())
        self._saving = None

    def _serve(self, verb: Literal["log", "validation", "save"]) -> None:
        self.active.control.pop_request(verb)
        self._is_served = True

    def connect_writer(self, bus: Bus, host: str) -> None:
        """Let the host be who writes at `SavePoint`, so that plugins find that somebody does."""

        def announce(run: Run, event: SavePoint) -> None:  # noqa: ARG001  # every handler takes an event
            assert self._saving is not None
            path, is_best = self._saving
            if path is None:
                return
            run.checkpoints.last = path
            if is_best:
                run.checkpoints.best = path
            run.emit(CheckpointSaved(path, is_best))

        announce.__qualname__ = host
        bus.on(SavePoint, announce, lane=Lane.PERSIST)
