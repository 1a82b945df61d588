"""Drive our plugins from the loop of another framework: its moments become our events, in our order.

A bridge makes one `HostedTraining` of the plugins and the `Host`, and calls, as its framework calls it:

    leave = training.begin(facts, saved, path)              TrainStart, CheckpointLoaded where it resumes
    training.begin_epoch(epoch)                             EpochStart
      training.begin_batch(batch)                           BatchStart
      training.end_forward(loss)                            ForwardEnd, where the host shows that moment
      training.end_backward(loss)                           BackwardEnd
      if training.begin_step(): ...drop the gradients...    GradientsReady; only before an optimizer step
      training.end_step()                                   StepEnd, or a skipped step is counted
      training.end_batch()                                  BatchEnd
      due = training.open_boundary()                        the ranks agree; at step boundaries only (or `serve`)
      ...the host logs, validates and saves what is due, and what it wants to itself:
        training.log(metrics)                               Log
        training.begin_validation() ... end_validation()    ValidationStart ... ValidationEnd
        training.save(path)                                 SavePoint, CheckpointSaved
      leave = training.close_boundary()                     ShouldStop; whether to end the epoch or the training
    training.end_epoch(is_over=...)                         EpochEnd, then a boundary as above
    training.finish()                                       LastBoundary, where the host can still do what is asked for
    result = training.end()                                 LastBoundary unless it came, TrainEnd, RunClosed
    training.fail(error)                                    RunFailed, RunClosed: whatever ends the loop

An error of a plugin passes through these methods to the host; the run is closed then, as by `fail`. What a checkpoint
of the host is to hold is in `saved.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from heliograph import Bus, DeviceEngine, Plugins, RunResult
from heliograph import events as ev
from heliograph.core.run_end import close_run
from heliograph.spi import LoopEngine, describe_error

from .batches import closes_on_error
from .boundary import STAY, BoundaryMoments, Leave
from .facts import Facts
from .host import Host
from .refusals import check_plugins
from .run import HostedRun
from .saved import Position, begin_at, capture, move_to, restore


class HostedTraining(BoundaryMoments):
    """Our plugins in the trainings of a host, one after the other.

    Args:
        plugins: plugin objects, in the order in which they run within a lane.
        host: whose loop it is.

    Attributes:
        run: the run that is under way, None outside of a training.
        result: how the last one ended, None before.

    Raises:
        TypeError: a plugin has a handler that does not fit its event.
        ValueError: plugins contradict each other.
    """

    def __init__(self, plugins: Iterable[Any], host: Host) -> None:
        self.host, self.bus = host, Bus()
        self.plugins = Plugins(self.bus)
        if not isinstance(plugins, Iterable):
            raise TypeError(f"Give the plugins as a list, as in [{type(plugins).__name__}(...)].")
        for plugin in plugins:
            self.plugins.register(plugin)
        self.plugins.load_added()
        self.connect_writer(self.bus, host.name)
        self.result: RunResult | None = None
        self._last_state: dict[str, Any] | None = None

    # The training.

    def begin(
        self,
        facts: Facts,
        saved: Mapping[str, Any] | None = None,
        path: Path | None = None,
        position: Position | None = None,
    ) -> Leave:
        """Begin a run; on several ranks a collective.

        Args:
            facts: what the host says of the training.
            saved: what its checkpoint holds of our run, where it resumes.
            path: that checkpoint.
            position: where the host begins or continues; None for the beginning, or for what `saved` says.

        Returns:
            Whether a plugin asks to stop at once, as one does that had stopped the run before.

        Raises:
            ValueError: a plugin cannot be served in this loop, or not by these settings.
        """
        if self.run is not None:
            self.fail(RuntimeError(f"{self.host.name} began another training; how this one ended was not seen."))
        self.result = self._last_state = None
        check_plugins(self.plugins, self.host, facts.does, validates=bool(facts.validation))
        self.plugins.check_free()
        if "validation" not in {*facts.does, *self.plugins.declared("asks")}:
            facts = replace(facts, validation={})  # which this run does not read
        self.run = run = self._open(facts)
        return self._start(run, saved, path, position or Position())

    @closes_on_error
    def _start(self, run: HostedRun, saved: Mapping[str, Any] | None, path: Path | None, position: Position) -> Leave:
        run.report.started = True
        continues = position != Position()
        if saved is None and continues:
            begin_at(run, position, path)
        with run.starting():
            self.plugins.reset()
            run.emit(ev.TrainStart())
        if saved is not None:
            restore(run, saved, path)
        self._samples_logged = run.progress.samples
        if run.checkpoints.resumed_at is not None:
            run.emit(ev.CheckpointLoaded(path))
        run.log_plan()
        leave = STAY
        if run.control.has_boundary or run.checkpoints.in_boundary:
            run.control.agree()
            leave = self.close_boundary()
        if run.epoch_is_over and position == (run.progress.epoch + 1, 0, position.step):
            leave = self._end_saved_epoch(run)
        elif continues:
            move_to(run, position)
        return leave

    def _end_saved_epoch(self, run: HostedRun) -> Leave:
        """End an epoch that was saved after its last batch: the host continues with the next."""
        self.begin_epoch(run.progress.epoch)
        self.end_epoch(is_over=True)
        run.control.agree()
        return self.close_boundary()

    @closes_on_error
    def finish(self) -> None:
        """Let plugins ask for what is left, as nothing is trained any more; `end` does it where the host has not."""
        run = self.active
        run.report.finished = True
        run.emit(ev.LastBoundary())

    @closes_on_error
    def end(self, actions: Mapping[str, Callable[[], object]] | None = None) -> RunResult:
        """End a run that completed or was stopped; return its result.

        Args:
            actions: what the host does for what is asked for at the end; see `serve`.
        """
        run = self.active
        if not run.report.finished:
            self.finish()
        self.serve(actions or {})
        run.emit(ev.TrainEnd())
        self.serve(actions or {})
        self._last_state = capture(run)
        return self._close(run, None)

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint of the host is to hold of this rank; after a training, of its end; else None."""
        return self._last_state if self.run is None else capture(self.run)

    def fail(self, error: BaseException) -> None:
        """Close the run for an error that ends the loop, unless it is closed.

        Raises:
            BaseException: what a plugin puts in place of the error.
        """
        if self.run is not None:
            try:
                self._last_state = capture(self.run)  # for a checkpoint that is written upon the error
            except Exception as other:  # noqa: BLE001  # must not take the place of the error
                error.add_note(f"heliograph: a checkpoint of now would not hold the plugins: {describe_error(other)}")
            self._close(self.run, error)

    # An epoch.

    @closes_on_error
    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, or continue the one that was begun when the checkpoint was written.

        Args:
            epoch: its number as the host counts, from 0.
        """
        run = self.active
        if epoch != run.progress.epoch:
            run.note(f"{run.host.name} counts this as epoch {epoch}, after {run.progress.epoch} whole ones")
            run.progress.epoch = epoch
        resumed, run.work.has_begun = run.work.has_begun, True
        run.emit(ev.EpochStart(epoch, resumed=resumed))

    @closes_on_error
    def end_epoch(self, *, is_over: bool) -> bool:
        """End an epoch; return whether it has ended, and so has a boundary of its own.

        Args:
            is_over: whether its data have ended; else it ends here only if `end_epoch` was granted, and the training
                ends within it.
        """
        run = self.active
        if not (is_over or run.control.should_end_epoch):
            return False
        run.stepping.clear()
        run.advance()
        run.emit(ev.EpochEnd(run.progress.epoch - 1))
        return True

    # Within.

    def _open(self, facts: Facts) -> HostedRun:
        with ExitStack() as life:
            engine = engine_of(facts, self.host)
            life.enter_context(engine.process())
            run = HostedRun(facts, self.host, self.bus, self.plugins, engine)
            self.plugins.open(run)
            life.callback(self.plugins.free)
            run.control.open()
            run.hooks.closing.push(life.pop_all())
        return run

    def _close(self, run: HostedRun, error: BaseException | None) -> RunResult:
        self.run, self._means = None, None
        try:
            close_run(run, error)
        finally:
            if hasattr(run.report, "result"):
                self.result = run.report.result
        result: RunResult = run.report.result
        return result


def engine_of(facts: Facts, host: Host) -> LoopEngine:
    """Return the engine that describes the hardware of a host, which moves and wraps everything itself.

    Raises:
        ValueError: the host trains with other processes than those of torch's process group.
    """
    if facts.world_size == 1:
        return DeviceEngine(facts.device)
    from .ranks import HostedRank

    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() != facts.world_size:
        raise ValueError(
            f"{host.name} trains with {facts.world_size} processes, and these are not those of torch.distributed, by "
            f"which plugins agree. Train with heliograph.Trainer."
        )
    return HostedRank(facts.device)
