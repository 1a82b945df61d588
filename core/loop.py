"""The training loop, the only place that emits the loop's events.

TrainStart. For each epoch: EpochStart. For each batch: BatchStart, forward, ForwardEnd, backward, BackwardEnd,
GradientsReady, optimizer step, StepEnd, BatchEnd. At a step boundary, if requested, in this order: ChangeServed, Log,
validation, SavePoint, ShouldStop. EpochEnd is followed by a boundary too. LastBoundary and TrainEnd are followed by a
boundary without ShouldStop. RunFailed after any exception. RunClosed always.

A validation that is cut short ends with ValidationCut. An epoch that is rolled back ends without EpochEnd, and
CheckpointLoaded follows as in a resume.

`fit` uses the same public functions (`epochs`, `batches`, `step`) as a user's own loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..events import catalogue as ev
from .context import RunContext
from .epoch_end import check_exhausted, epoch_has_ended, finish_abandoned_batch
from .metrics import Metrics
from .stepping.windows import OptimizerWindow

if TYPE_CHECKING:
    from .evaluation import Evaluation

BATCH_START, FORWARD_END, BACKWARD_END = ev.BatchStart(), ev.ForwardEnd(), ev.BackwardEnd()
GRADIENTS_READY, STEP_END, BATCH_END, SHOULD_STOP = ev.GradientsReady(), ev.StepEnd(), ev.BatchEnd(), ev.ShouldStop()


def fit(run: RunContext) -> None:
    """Train."""
    take_losses = run.stepping.for_each_loss(step)
    for _ in epochs(run):
        forward = run.stepping.forward  # not earlier: a handler of TrainStart may replace it
        for batch in batches(run):
            take_losses(run, forward(run, batch))


def epochs(run: RunContext) -> Iterator[int]:
    """Yield the index of each epoch. Emit TrainStart, the events of each epoch, LastBoundary and TrainEnd."""
    control, run.report.started = run.control, True
    with run.starting():
        run.plugins.reset()
        run.emit(ev.TrainStart())
    run.prepare_comparison()
    restore_or_continue(run)
    run.log_plan()
    while run.epoch_is_over or not (control.stopped or run.is_complete):
        begin_epoch(run)
        if not control.leaving:
            yield run.progress.epoch
        run.hooks.call_positioned()  # in case the user's loop did not read the loader
        close_epoch(run)
        if control.is_rolling_back:
            restore_or_continue(run)
    run.compare_end()
    finish(run)


def restore_or_continue(run: RunContext) -> None:
    """If a plugin resumes or rolls back, load that state, emit CheckpointLoaded and run a boundary."""
    while True:
        if run.control.is_rolling_back:
            run.discard_epoch()
        if run.checkpoints.is_resuming:
            from .resumption import restoring  # imported when a state is loaded

            with restoring(run) as path:
                run.emit(ev.CheckpointLoaded(path))
        if run.control.has_boundary or run.checkpoints.in_boundary:
            boundary(run)
        if not run.control.is_rolling_back:  # else a handler rolled back again at once
            return


def begin_epoch(run: RunContext) -> None:
    """Emit EpochStart, then run a boundary, unless a resumed epoch has already had it."""
    resumed, run.work.has_begun = run.work.has_begun, True
    with run.comparing_start():
        run.emit(ev.EpochStart(run.progress.epoch, resumed=resumed))
    if not resumed and run.control.has_boundary:
        boundary(run)


def batches(run: RunContext) -> Iterator[Any]:
    """Yield each batch of the epoch that is not skipped. Emit BatchStart and BatchEnd; run a boundary if needed.

    Emit Replay while a resumed run reads the loader up to its position, which may take hours. The conditions keep the
    cost of a batch without handlers close to zero.
    """
    control, progress, hot, bus, work = run.control, run.progress, run.hot, run.bus, run.work
    finishes, last_step, is_shared = run.stepping.is_named, run.last_step, control.is_shared
    for work.batch in run.feed(lambda done, total: run.emit(ev.Replay(done, total))):
        work.in_hand = True
        if (bus.receiver_count and hot.batch_start.chain) or control.votes_on_batches:
            open_batch(run)
        if not control.touched or not control.skips_batch:
            yield work.batch
        if control.touched or finishes:
            finish_batch(run)
        progress.batch += 1
        work.in_hand = False
        if bus.receiver_count or control.pending or control.touched or is_shared:
            close_batch(run)
        if control.leaving or progress.steps >= last_step:
            break
    else:
        check_exhausted(run)


def open_batch(run: RunContext) -> None:
    """Emit BatchStart and apply what its handlers request for the batch."""
    run.hot.batch_start.emit(run, BATCH_START)
    run.control.agree_on_batch()
    if run.control.holds_step and not run.data.is_last_batch:
        run.work.contexts.enter_context(run.engine.no_sync())


def finish_batch(run: RunContext) -> None:
    """Finish a batch with requests. A skipped batch still ends its window, which emits GradientsReady and StepEnd."""
    run.work.contexts.close()
    if run.control.skips_batch:
        run.control.count_skip("skipped_batches")
    run.stepping.end_batch()
    if not run.control.holds_step or run.data.is_last_batch:
        flush(run)


def close_batch(run: RunContext) -> None:
    """Emit BatchEnd, then run a boundary if one is needed."""
    control, hot = run.control, run.hot
    if hot.batch_end.chain:
        hot.batch_end.emit(run, BATCH_END)
    run.outputs = None
    if control.touched:
        control.close_batch()
    judged = bool(hot.should_stop.chain)
    if (judged or control.pending or control.is_shared) and control.is_due(window=run.stepping.window, judged=judged):
        boundary(run, in_epoch=True)


def step(run: RunContext, loss: Any, name: str | None = None) -> None:
    """Emit ForwardEnd, run the backward pass, emit BackwardEnd, and close the window if this batch is its last."""
    control, stepping, hot, size = run.control, run.stepping, run.hot, run.size_of(run.work.batch)
    has_receivers, is_shared, window = run.bus.receiver_count, control.is_shared, stepping.checked
    if window is None or name is not None or loss.__class__ is tuple:
        window, loss = stepping.take(run, name, loss)
    window.loss = run.loss = loss
    if stepping.is_first_loss:
        run.progress.samples += run.data.sum_of_all_ranks(size) if is_shared else size
    if has_receivers or is_shared:
        if (hot.log.chain or is_shared) and window.counts is None:  # another rank may log
            window.kept.append((loss.detach().clone() if control.holds_step else loss, size, False))
        if hot.forward_end.chain:
            hot.forward_end.emit(run, FORWARD_END)
    if control.loss_scale == 1.0:
        window.backward(loss)
    else:
        window.backward_scaled(loss, control.loss_scale)
    window.size += 1
    if has_receivers and hot.backward_end.chain:
        hot.backward_end.emit(run, BACKWARD_END)
    if not control.holds_step or run.data.is_last_batch:
        close_window(run, window)


def close_window(run: RunContext, window: OptimizerWindow) -> None:
    """Emit GradientsReady, step the optimizer unless the step is dropped, and emit StepEnd."""
    control, stepping, hot, has_receivers = run.control, run.stepping, run.hot, run.bus.receiver_count > 0
    run.loss = stepping.select(window, control) if stepping.is_named else window.loss
    if window.counts is not None:
        window.counts.normalise()
    if has_receivers and hot.gradients_ready.chain:
        run.engine.unscale(window.optimizer)
        hot.gradients_ready.emit(run, GRADIENTS_READY)
    if control.is_shared:
        control.agree_on_step()
    stepped = not control.drops_step and window.step() is not False
    if window.kept:
        run.means.settle(window.label, window.kept, stepped)
    if stepped:
        run.progress.steps += 0 if stepping.has_stepped else 1  # a round of several optimizers counts as one step
        if has_receivers and hot.step_end.chain:
            hot.step_end.emit(run, STEP_END)
    window.size = 0
    window.zero_grad()
    if stepping.is_named or not stepped:
        stepping.deselect(control, stepped)


def flush(run: RunContext) -> None:
    """Step with all remaining gradients and end the round. Emit GradientsReady and StepEnd for each optimizer."""
    for window in run.stepping.unfinished():
        close_window(run, window)
    run.stepping.end_round(run.control)


def boundary(run: RunContext, *, in_epoch: bool = False) -> None:
    """Serve the requests, emit ShouldStop, then decide whether to leave the loop."""
    control, should_stop = run.control, run.hot.should_stop
    if pending := control.agree(in_epoch=in_epoch):
        serve(run)
    if run.checkpoints.in_boundary:  # of a run that resumed from a save here
        run.checkpoints.in_boundary, pending = False, True
        control.release()
    if should_stop.chain:
        should_stop.emit(run, SHOULD_STOP)
    control.decide(served=pending, in_epoch=run.work.has_begun)


def serve(run: RunContext) -> None:
    """Change the run, log, validate and save, in this order, if requested; each may be requested by the previous one.

    Emit ChangeServed, Log, the events of the validation and SavePoint. A run that resumes from this checkpoint
    has only ShouldStop of this boundary left.
    """
    control = run.control
    for request in control.pop_changes():
        from .stepping.changes import serve_change  # imported when a change is served

        facts = request.verb, request.target, request.value, request.by, request.reason
        run.emit(ev.ChangeServed(*facts, *serve_change(run, request)))
    if control.pop_request("next_phase") and run.data.ask_to_advance(between_epochs=not run.progress.batch):
        control.end_epoch("the next phase was requested", by="the loop")
    if run.report.finished and control.should_save and (control.should_log or control.should_validate):
        from .snapshot import hold  # imported when the end is saved

        hold(run)
    if control.pop_request("log"):
        publish(run, ev.Log(Metrics(run.means.read(run.phase)), run.means.weights))
        control.agree()
    if control.pop_request("validation"):
        run.progress.validations += evaluate(run, "validation")
        control.agree()
    if control.pop_request("save"):
        with run.report.saving(), run.evaluating_weights():
            run.emit(ev.SavePoint())


def publish(run: RunContext, event: ev.Log | ev.ValidationEnd | ev.TestEnd | ev.PredictEnd) -> None:
    """Emit an event with metrics, then add the metrics to the run and to its log rows."""
    from .metrics.log_rows import add_row  # imported when something is logged

    run.emit(event)
    run.metrics.update(event.metrics)
    add_row(run, event.metrics)


def evaluate(run: RunContext, phase: ev.Phase) -> bool:
    """Evaluate every set of a phase in eval mode without gradients. Return True unless it was cut short."""
    from .evaluation import evaluating  # imported when something is evaluated

    with evaluating(run, phase) as evaluation:
        for batch in evaluated(run, evaluation):
            evaluation.step(batch)
    return evaluation.is_complete


def evaluated(run: RunContext, evaluation: Evaluation) -> Iterator[Any]:
    """Yield each batch of an evaluation. Emit its start, the events of each batch, and its end or ValidationCut."""
    start, batch_start, batch_end, end = evaluation.events
    before, after, work = run.bus.signal(batch_start), run.bus.signal(batch_end), run.work
    run.emit(start())
    for dataset, work.batch in evaluation.batches():
        if before.chain:
            before.emit(run, batch_start(dataset))
        yield work.batch
        if after.chain:
            after.emit(run, batch_end(dataset))
    if cut := evaluation.close():
        run.emit(ev.ValidationCut(cut.reason))
        evaluation.stop_after(cut)
    else:
        publish(run, end(Metrics(evaluation.metrics())))


def close_epoch(run: RunContext) -> None:
    """Emit EpochEnd, then run a boundary. An early end with a postponed validation keeps the epoch open."""
    control = run.control
    finish_abandoned_batch(run)
    control.agree()
    if run.stepping.window and not control.is_rolling_back:
        flush(run)
        control.close_batch()
        control.agree()
    run.loss = run.work.batch = None
    run.stepping.clear()
    if control.is_rolling_back or control.keeps_epoch_open or not epoch_has_ended(run):
        return
    run.advance()
    run.emit(ev.EpochEnd(run.progress.epoch - 1))
    boundary(run)


def finish(run: RunContext) -> None:
    """Emit LastBoundary, then TrainEnd, and serve what the handlers of each request."""
    run.report.finished = True
    if run.modes is not None:
        run.modes.eval()
    for event in (ev.LastBoundary(), ev.TrainEnd()):
        run.emit(event)
        for _ in range(2):  # the second time for what the first one requested
            run.control.agree()
            serve(run)


def end(run: RunContext, error: BaseException | None) -> Iterator[tuple[str, str, BaseException]]:
    """Emit RunFailed after an error, then RunClosed. Yield (plugin, event, error) for each handler that fails."""
    failure = [] if error is None else [ev.RunFailed(error, run.phase, *run.blame(error))]
    for event in (*failure, ev.RunClosed(run.report.status)):
        for owner, secondary in run.bus.signal(type(event)).emit_each(run, event):
            yield owner, event.name, secondary
