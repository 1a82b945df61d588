"""Driver of plugins in another framework's loop.

A bridge creates one `HostedTraining` from the plugins and the `HostLoop`, and calls these methods:

    leave = training.begin(facts, saved, path)              TrainStart, CheckpointLoaded if it resumes
    training.begin_epoch(epoch)                             EpochStart
      training.begin_batch(batch)                           BatchStart
      training.end_forward(loss)                            ForwardEnd, if the host has such a callback
      training.end_backward(loss)                           BackwardEnd
      if training.begin_step(): ...drop the gradients...    GradientsReady; only before an optimizer step
      training.end_step()                                   StepEnd, or a skipped step is counted
      training.end_batch()                                  BatchEnd
      due = training.open_boundary()                        exchange of requests; only at step boundaries (or `serve`)
      ...the host logs, validates and saves as requested and as scheduled:
        training.log(metrics)                               Log
        training.begin_validation() ... end_validation()    ValidationStart ... ValidationEnd
        training.save(path)                                 SavePoint, CheckpointSaved
      leave = training.close_boundary()                     ShouldStop; whether to end the epoch or the training
    training.end_epoch(is_over=...)                         EpochEnd, then a boundary as above
    training.finish()                                       LastBoundary, while the host can still serve requests
    result = training.end()                                 LastBoundary unless already emitted, TrainEnd, RunClosed
    training.fail(error)                                    RunFailed, RunClosed: after any error

An error of a plugin is raised to the host after the run was closed as by `fail`. `saved.py` defines the state in the
host's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from heliograph import Bus, DeviceEngine, Lane, Plugins, Run, RunResult
from heliograph import events as ev
from heliograph.core.loop import publish
from heliograph.core.metrics.means import Means
from heliograph.core.run_end import close_run
from heliograph.spi import LoopEngine, Metrics, ProcessEngine, describe_error
from torch import Tensor

from .host import HostLoop, check_plugins
from .run import HostedRun, TrainingFacts
from .saved import Position, begin_at, capture, move_to, restore

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=ev.Event)
T = TypeVar("T", bound="HostedTraining")

LOSS = "train/loss"


def in_run(method: Callable[Concatenate[T, HostedRun, P], R]) -> Callable[Concatenate[T, P], R]:
    """Pass the run to a method; close the run if it raises, before the error reaches the host."""

    @wraps(method)
    def guarded(training: T, /, *args: P.args, **options: P.kwargs) -> R:
        try:
            return method(training, training.active, *args, **options)
        except BaseException as error:
            training.fail(error)
            raise

    return guarded


def emit(run: HostedRun, signal: ev.OrderedSignal[E], event: Callable[[], E]) -> None:
    if signal.chain:  # these events come with every batch
        signal.emit(run, event())


class Leave(NamedTuple):
    """The decision at a boundary.

    Attributes:
        stop: whether the training ends here.
        end_epoch: whether the epoch ends here.
    """

    stop: bool = False
    end_epoch: bool = False


class HostedTraining:
    """Plugins in the consecutive trainings of a host.

    Args:
        plugins: plugin objects, in their order within a lane.
        host: the capabilities of the loop.

    Attributes:
        run: the current run; None outside of a training.
        result: the result of the last run; None before.

    Raises:
        TypeError: a plugin has a handler that does not fit its event.
        ValueError: plugins contradict each other.
    """

    run: HostedRun | None = None
    _is_counted = False  # whether the samples of the batch are counted
    _is_dropped = False  # whether the gradients of the last window were dropped
    _saving: tuple[Path | None, bool] | None = None
    _means: Means | None = None
    _is_served = False
    _samples_logged = 0  # samples until the last log of the loss

    def __init__(self, plugins: Iterable[Any], host: HostLoop) -> None:
        self.host, self.bus = host, Bus()
        self.plugins = Plugins(self.bus)
        if not isinstance(plugins, Iterable):
            raise TypeError(f"Pass the plugins as a list, as in [{type(plugins).__name__}(...)].")
        for plugin in plugins:
            self.plugins.register(plugin)
        self.plugins.load_added()
        self.connect_writer(self.bus, host.name)
        self.result: RunResult | None = None
        self._last_state: dict[str, Any] | None = None

    # The training.

    def begin(
        self,
        facts: TrainingFacts,
        saved: Mapping[str, Any] | None = None,
        path: Path | None = None,
        position: Position | None = None,
    ) -> Leave:
        """Begin a run. A collective.

        Args:
            facts: the description of the training.
            saved: the saved state of the resumed checkpoint.
            path: the resumed checkpoint.
            position: the host's position; None for the beginning, or for the position in `saved`.

        Returns:
            Whether to stop at once, because a plugin had stopped the saved run.
        """
        if self.run is not None:
            self.fail(RuntimeError(f"{self.host.name} began another training before the end of this one."))
        self.result = self._last_state = None
        check_plugins(self.plugins, self.host, facts.does, validates=bool(facts.validation))
        self.plugins.check_free()
        if "validation" not in {*facts.does, *self.plugins.declared("asks")}:
            facts = replace(facts, validation={})  # this run does not read it
        self.run = self._open(facts)
        return self._start(saved, path, position or Position())

    @in_run
    def _start(self, run: HostedRun, saved: Mapping[str, Any] | None, path: Path | None, position: Position) -> Leave:
        run.report.started = True
        continues = position != Position()
        if saved is None and continues:
            begin_at(run, position, path)
        with run.isolating():
            self.plugins.reset()
            run.emit(ev.TrainStart())
        if saved is not None:
            restore(run, saved, path)
        self._samples_logged = run.progress.samples
        if run.checkpoints.resumed_at is not None:
            run.emit(ev.CheckpointLoaded(path))
        run.log_plan()
        leave = Leave()
        if run.control.has_boundary or run.checkpoints.in_boundary:
            run.control.agree()
            leave = self.close_boundary()
        if run.epoch_is_over and position == (run.progress.epoch + 1, 0, position.step):
            self.begin_epoch(run.progress.epoch)
            self.end_epoch(is_over=True)
            run.control.agree()
            leave = self.close_boundary()
        elif continues:
            move_to(run, position)
        return leave

    @in_run
    def finish(self, run: HostedRun) -> None:
        run.report.finished = True
        run.emit(ev.LastBoundary())

    @in_run
    def end(self, run: HostedRun, actions: Mapping[str, Callable[[], object]] | None = None) -> RunResult:
        if not run.report.finished:
            self.finish()
        self.serve(actions or {})
        run.emit(ev.TrainEnd())
        self.serve(actions or {})
        self._last_state = capture(run)
        return self._close(run, None)

    def state(self) -> dict[str, Any] | None:
        """Return the state of this rank for the host's checkpoint; after a training, the state at its end."""
        return self._last_state if self.run is None else capture(self.run)

    def fail(self, error: BaseException) -> None:
        """Close the run because of an error, unless it is closed. A plugin may replace the error."""
        if self.run is not None:
            try:
                self._last_state = capture(self.run)  # for a checkpoint that the host writes after the error
            except Exception as secondary:  # noqa: BLE001  # must not replace the error
                error.add_note(
                    f"heliograph: a checkpoint of now would not hold the plugins: {describe_error(secondary)}"
                )
            self._close(self.run, error)

    # An epoch.

    @in_run
    def begin_epoch(self, run: HostedRun, epoch: int) -> None:
        if epoch != run.progress.epoch:
            run.note(f"{run.host.name} counts this as epoch {epoch}, after {run.progress.epoch} complete epochs")
            run.progress.epoch = epoch
        resumed, run.work.has_begun = run.work.has_begun, True
        run.emit(ev.EpochStart(epoch, resumed=resumed))

    @in_run
    def end_epoch(self, run: HostedRun, *, is_over: bool) -> bool:
        """End an epoch; return whether it has ended, and so has its own boundary.

        If the data are not used up, the epoch only ends if `end_epoch` was granted.
        """
        if not (is_over or run.control.should_end_epoch):
            return False
        run.stepping.clear()
        run.advance()
        run.emit(ev.EpochEnd(run.progress.epoch - 1))
        return True

    # A batch.

    @in_run
    def begin_batch(self, run: HostedRun, batch: Any) -> None:
        self.leave_validation()
        run.work.batch, run.work.in_hand = batch, True
        self._is_counted = False
        emit(run, run.hot.batch_start, ev.BatchStart)
        if run.work.batch is not batch:
            raise RuntimeError(
                f"A plugin replaced run.batch, but {run.host.name} ignores that. Instead, {run.host.remedy('batches')}."
            )

    @in_run
    def end_forward(self, run: HostedRun, loss: Tensor) -> None:
        self._take(run, loss)
        emit(run, run.hot.forward_end, ev.ForwardEnd)

    @in_run
    def end_backward(self, run: HostedRun, loss: Tensor | None) -> None:
        self._take(run, loss)
        run.stepping.first.size += 1
        emit(run, run.hot.backward_end, ev.BackwardEnd)

    def track_loss(self, loss: Tensor) -> None:
        """Add the loss of the micro-batch to `train/loss` of the next log, if the host does not log a loss.

        It is added at the end of the window, unless the gradients of the window were dropped.
        """
        run = self.active
        if run.report.tracks:
            run.stepping.first.kept.append((loss.detach().clone(), run.size_of(run.work.batch), False))

    @in_run
    def begin_step(self, run: HostedRun) -> bool:
        """Emit `GradientsReady`; return whether to drop the gradients, on all ranks."""
        emit(run, run.hot.gradients_ready, ev.GradientsReady)
        run.control.agree_on_step()
        return run.control.drops_step

    @in_run
    def end_step(self, run: HostedRun, *, stepped: bool = True) -> None:
        """Count an optimizer step, or a skipped one, for example because of infinite fp16 gradients."""
        run.stepping.first.size = 0
        self._is_dropped = run.control.drops_step or not stepped
        if self._is_dropped:
            run.control.count_skip("skipped_steps", by_engine=not run.control.drops_step)
        else:
            run.progress.steps += 1
            emit(run, run.hot.step_end, ev.StepEnd)

    @in_run
    def end_batch(self, run: HostedRun, loss: Tensor | None = None) -> None:
        self._take(run, run.loss if loss is None else loss)
        window = run.stepping.first
        if window.kept and not window.size:
            run.means.settle(window.label, window.kept, stepped=not self._is_dropped)
        run.progress.batch += 1
        run.work.in_hand = False
        emit(run, run.hot.batch_end, ev.BatchEnd)
        run.outputs = run.work.batch = None
        run.control.close_batch()

    def _take(self, run: HostedRun, loss: Tensor | None) -> None:
        run.loss = run.stepping.first.loss = loss
        if not self._is_counted:
            self._is_counted, size = True, run.size_of(run.work.batch)
            run.progress.samples += run.data.sum_of_all_ranks(size) if run.control.is_shared else size

    # A boundary.

    @in_run
    def open_boundary(self, run: HostedRun) -> frozenset[str]:
        """Exchange requests among the ranks; return the requested actions, out of `log`, `validation`, `save`."""
        self.leave_validation()
        run.boundary_is_open, control = True, run.control
        control.agree()
        if not control.pending:  # the usual case
            return frozenset()
        asked = {"log": control.should_log, "validation": control.should_validate, "save": control.should_save}
        return frozenset(verb for verb, is_asked in asked.items() if is_asked)

    @in_run
    def serve(self, run: HostedRun, actions: Mapping[str, Callable[[], object]]) -> None:
        """Open a boundary and serve requests in order, including later ones that an action triggers."""
        due = self.open_boundary()
        for verb, act in actions.items():
            if verb in due:
                act()
                due = self.open_boundary()

    @in_run
    def close_boundary(self, run: HostedRun) -> Leave:
        """Emit `ShouldStop` and return the decision, after the host has served all requests."""
        control = run.control
        if run.checkpoints.in_boundary:  # the resumed state was saved at this boundary
            run.checkpoints.in_boundary = False
            control.release()
        emit(run, run.hot.should_stop, ev.ShouldStop)
        control.decide(served=self._is_served, in_epoch=run.work.has_begun)
        self._is_served = run.boundary_is_open = False
        return Leave(control.stopped, control.should_end_epoch)

    @in_run
    def log(self, run: HostedRun, metrics: Mapping[str, float], *, with_tracked: bool = True) -> None:
        """Log the host's metrics and tracked values.

        Args:
            run: the run.
            metrics: by our names. `train/loss` is the mean over the samples since the last log.
            with_tracked: False within a batch or if only some ranks log: it is no collective then, and requests stay
                pending.
        """
        tracked: dict[str, float] = {}
        weights: dict[str, float] = {}
        if with_tracked:
            self._serve("log")
            tracked, weights = run.means.read("train"), dict(run.means.weights)
        if LOSS in metrics and (samples := run.progress.samples - self._samples_logged):
            self._samples_logged += samples
            weights[LOSS] = samples
            if LOSS not in tracked:  # tracked values are already in the totals
                total, weight = run.means.totals.get("loss", (0.0, 0.0))
                run.means.totals = {**run.means.totals, "loss": (total + metrics[LOSS] * samples, weight + samples)}
        publish(run, ev.Log(Metrics({**tracked, **metrics}), weights))

    @in_run
    def begin_validation(self, run: HostedRun, batches: int | None = None) -> None:
        self.leave_validation()
        self._serve("validation")
        run.phase, run.progress.evaluated, run.data.evaluation_batches = "validation", 0, batches
        self._means = run.means
        del run.means  # recreated on demand
        run.emit(ev.ValidationStart())

    @in_run
    def begin_validation_batch(self, run: HostedRun, batch: Any, dataset: str = "") -> None:
        run.work.batch = batch
        run.emit(ev.ValidationBatchStart(dataset))

    @in_run
    def end_validation_batch(self, run: HostedRun, dataset: str = "") -> None:
        run.progress.evaluated += 1
        run.emit(ev.ValidationBatchEnd(dataset))
        run.work.batch = None

    @in_run
    def end_validation(self, run: HostedRun, metrics: Mapping[str, float]) -> None:
        tracked = run.means.read("validation")
        publish(run, ev.ValidationEnd(Metrics({**tracked, **metrics})))
        assert self._means is not None
        run.phase, run.means, self._means = "train", self._means, None
        run.progress.validations += 1

    def leave_validation(self) -> None:
        """End a validation that the host has left early, for example because of a handled error."""
        run = self.active
        if self._means is not None:
            means, self._means = self._means, None
            run.emit(ev.ValidationCut(f"{run.host.name} left the validation early"))
            run.phase, run.means = "train", means

    def stop_by_host(self, reason: str) -> None:
        run = self.active
        if not (run.is_complete or run.control.stopped):
            run.control.stop(reason, by=run.host.name)
            run.control.decide()

    @in_run
    def save(self, run: HostedRun, path: Path | None, *, is_best: bool = False) -> None:
        """Announce a checkpoint of the host, which contains our state.

        Args:
            run: the run.
            path: its file or folder; None if unknown, then no `CheckpointSaved` is emitted.
            is_best: whether it is the best so far, according to the host.
        """
        self._serve("save")
        self._saving = path, is_best
        with run.report.saving():
            run.emit(ev.SavePoint())
        self._saving = None

    def _serve(self, verb: Literal["log", "validation", "save"]) -> None:
        self.active.control.pop_request(verb)
        self._is_served = True

    def connect_writer(self, bus: Bus, host: str) -> None:
        """Register the host as the handler that writes checkpoints at `SavePoint`."""

        def announce(run: Run, event: ev.SavePoint) -> None:  # noqa: ARG001  # every handler takes an event
            assert self._saving is not None
            path, is_best = self._saving
            if path is None:
                return
            run.checkpoints.last = path
            if is_best:
                run.checkpoints.best = path
            run.emit(ev.CheckpointSaved(path, is_best))

        announce.__qualname__ = host
        bus.on(ev.SavePoint, announce, lane=Lane.PERSIST)

    # Opening and closing.

    @property
    def active(self) -> HostedRun:
        assert self.run is not None, "a training has begun"
        return self.run

    def _open(self, facts: TrainingFacts) -> HostedRun:
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


class HostedRank(ProcessEngine):
    """One of several processes whose models the host moves, wraps and synchronizes.

    Additional process groups for votes and objects are created; the host's own group is not changed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device)

    def tear_down(self) -> None: ...

    def unwrap(self) -> None: ...


def engine_of(facts: TrainingFacts, host: HostLoop) -> LoopEngine:
    """Return an engine that only describes the host's hardware."""
    if facts.world_size == 1:
        return DeviceEngine(facts.device)
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() != facts.world_size:
        raise ValueError(
            f"{host.name} trains with {facts.world_size} processes, but torch.distributed has no process group of that "
            f"size, which plugins need. Train with heliograph.Trainer."
        )
    return HostedRank(facts.device)


class PluginOwner:
    """The plugins and the result of a bridge's trainings."""

    _training: HostedTraining

    @property
    def plugins(self) -> Plugins:
        """The plugins, for lookup, enabling and disabling."""
        return self._training.plugins

    @property
    def result(self) -> RunResult | None:
        """The result of the last training; None before the first and during a training."""
        return self._training.result


def drop_gradients(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
