"""The loop: every event that it emits is emitted here.

TrainStart, then for each epoch EpochStart, for each batch BatchStart, forward and backward, GradientsReady, optimizer
step, StepEnd, BatchEnd, and at a step boundary what was asked for, in this order: Log, validation, SavePoint,
ShouldStop. EpochEnd is followed by such a boundary too, and so is TrainEnd, but for ShouldStop. RunFailed after any
exception; RunClosed always.

A validation that is cut short ends with ValidationCut. An epoch that is rolled back ends without EpochEnd, and
CheckpointLoaded follows as in a resume.

`fit` is made of the same public pieces (`epochs`, `batches`, `step`) that a loop of one's own is made of.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..events import Request
from ..events import catalogue as ev
from ..events.control import EVALUATION
from .batches import abandon, check_exhausted, refuse_unread
from .evaluation import evaluating
from .metrics import Metrics
from .rounds import checked_losses, next_loss
from .state import restore, settle_unseen
from .task import check_loss
from .unseen.comparison import Unseen, compare_listeners

if TYPE_CHECKING:
    from .rounds import Round, Turn
    from .run import TrainRun

logger = logging.getLogger("heliograph")
BATCH_START, GRADIENTS_READY, STEP_END = ev.BatchStart(), ev.GradientsReady(), ev.StepEnd()
BATCH_END, SHOULD_STOP = ev.BatchEnd(), ev.ShouldStop()
EVALUATIONS: dict[ev.Phase, tuple[Any, Any, Any, Any]] = {
    "validation": (ev.ValidationStart, ev.ValidationBatchStart, ev.ValidationBatchEnd, ev.ValidationEnd),
    "test": (ev.TestStart, ev.TestBatchStart, ev.TestBatchEnd, ev.TestEnd),
}


def fit(run: TrainRun) -> None:
    """Train."""
    take = step if run.round is None else step_each
    for _ in epochs(run):
        for batch in batches(run):
            take(run, run.forward(run, batch))


def epochs(run: TrainRun) -> Iterator[int]:
    """Yield the index of each epoch, amid the events of the run and of the epochs."""
    control, run.started = run.control, True
    control.stage = "TrainStart"
    with run.starting():
        run.plugins.reset()
        run.emit(ev.TrainStart())
    control.stage = ""
    if run.saved is not None or run.bus.signal(ev.SavePoint).chain:
        run.unseen = Unseen.of(run)
    take_up(run)
    while run.epoch_is_over or not (control.stopped or run.is_complete):
        begin_epoch(run)
        if not control.leaving:
            yield run.progress.epoch
        run.arrive()  # in case nobody read the loader
        close_epoch(run)
        if control.turns_back:
            take_up(run)
    finish(run)


def take_up(run: TrainRun) -> None:
    """Go on from the state that a plugin resumes or rolls back to, if one does, and serve what was due there."""
    control = run.control
    while True:
        if control.turns_back:
            give_up_epoch(run)
        if (cut := restore(run)) is not None:
            run.emit(ev.CheckpointLoaded(run.saved_path))
            settle_unseen(run, cut)
        if control.pending or run.shared or run.in_boundary:
            boundary(run)
        if not control.turns_back:  # nobody rolled back at once
            return


def begin_epoch(run: TrainRun) -> None:
    """Tell that an epoch begins; one that had begun before the state was saved has had its boundary here, too."""
    resumed, run.epoch_begun = run.epoch_begun, True
    run.emit(ev.EpochStart(run.progress.epoch, resumed=resumed))
    compare_listeners(run)
    if not resumed and (run.control.pending or run.shared):
        boundary(run)


def give_up_epoch(run: TrainRun) -> None:
    """Drop what an epoch has begun that is rolled back: its requests, its window, its numbers."""
    run.settle()  # nothing of it is told of behind the return
    run.control.turn_back()
    run.window, run.loss, run.batch, run.outputs = 0, None, None, None
    run.exhausted = run.last_seen = False
    run.metrics.clear()
    if run.round is not None:
        run.round.clear()
    for optimizer in run.optimizers.values():
        run.engine.bind_zero_grad(optimizer)()


def tell_replay(run: TrainRun, done: int, batches: int) -> None:
    """Tell how far the loader is read again; what may take hours does not go on in silence."""
    what = f"{batches} batches of epoch {run.progress.epoch} again to reach the position of the checkpoint"
    if done == 0 and not run.bus.signal(ev.Replay).chain:
        logger.warning("run %r reads %s", run.name, what)
    run.emit(ev.Replay(done, batches))
    if done == batches:
        run.note(f"read {what}")


def batches(run: TrainRun) -> Iterator[Any]:
    """Yield each batch of the epoch that is not skipped, amid its events and the boundary behind it."""
    control, progress, hot, bus = run.control, run.progress, run.hot, run.bus
    is_voted = run.agreement.on_batches
    for run.batch in run.feed():
        run.in_hand = True
        if (bus.links and hot.batch_start.chain) or is_voted:
            open_batch(run)
        if not control.touched or not control.skips_batch:
            yield run.batch
        if control.touched:
            settle_batch(run)
        progress.batch += 1
        run.in_hand = False
        # Where nothing listens, six looks at cold memory are spared.
        if bus.links or control.pending or control.touched or run.shared:
            close_batch(run)
        if control.leaving or progress.steps >= run.last_step:
            break
    else:
        check_exhausted(run)


def close_batch(run: TrainRun) -> None:
    """Tell that the batch is done and, at a step boundary, serve what was asked for."""
    control, hot = run.control, run.hot
    if hot.batch_end.chain:
        hot.batch_end.emit(run, BATCH_END)
    run.outputs = None
    if control.touched:
        control.close_batch()
    if run.shared:
        if run.agreement.is_due():
            boundary(run)
    elif (control.pending or hot.should_stop.chain) and (not run.window or control.turns_back):
        boundary(run)


def step(run: TrainRun, loss: Tensor) -> None:
    """Take a loss backward and, where its window ends, step the optimizer."""
    progress, links = run.progress, run.bus.links
    if run.loss is None:  # the first of every epoch
        check_loss(loss)
    run.loss = loss
    size = run.size_of(run.batch)
    progress.samples += size if not run.shared else run.data.of_all_ranks(size)
    if links or run.window or run.shared:  # somebody may want the loss or the gradients for himself
        if run.log.chain or run.shared:  # of several ranks, some other may be the one that logs
            run.means.add("loss", loss, size)
        if run.control.touched or run.window or run.hot.gradients_ready.chain or run.agreement.on_steps:
            accumulate(run, loss)
            return
    run.backward(loss)
    if run.take_step() is not False:
        progress.steps += 1
        if links and run.hot.step_end.chain:
            run.hot.step_end.emit(run, STEP_END)
    else:
        progress.skipped_steps += 1
    run.zero_grad()


def accumulate(run: TrainRun, loss: Tensor) -> None:
    """Add a loss to the window's gradients; step with them where the window ends."""
    control = run.control
    run.engine.backward_scaled(loss, control.loss_scale)
    run.window += 1
    if not control.holds_step or run.is_last_batch:
        close_window(run)


def close_window(run: TrainRun) -> None:
    """Step with the gradients of a complete window, unless they are dropped."""
    if stepped(run):
        run.progress.steps += 1
        run.hot.step_end.emit(run, STEP_END)
    else:
        run.progress.skipped_steps += 1
    run.window = 0
    run.zero_grad()


def stepped(run: TrainRun) -> bool:
    """Let handlers see, clip or drop complete gradients, then step with them; return whether that was done."""
    control = run.control
    run.engine.unscale(run.optimizer)
    control.stage = "GradientsReady"
    run.hot.gradients_ready.emit(run, GRADIENTS_READY)
    control.stage = ""
    run.agreement.settle_step()
    return not control.drops_step and run.take_step() is not False


def step_each(run: TrainRun, losses: Any) -> None:
    """Take each loss that a training step yields backward and step its optimizer, before the next is computed."""
    with closing(checked_losses(losses)) as several:
        while (pair := next_loss(run, several)) is not None:
            step_named(run, *pair)


def step_named(run: TrainRun, name: str | None, loss: Tensor) -> None:
    """Take one of several losses backward and, where its window ends, step its optimizer."""
    control, several = run.control, run.round
    assert several is not None
    turn = several.begin(name, loss)
    control.touched = True  # so that the round is closed behind the batch
    run.loss, size = loss, run.size_of(run.batch)
    if len(several.taken) == 1:  # the first of the batch
        run.progress.samples += size if not run.shared else run.data.of_all_ranks(size)
    if run.log.chain or run.shared:
        run.means.add(run.label("loss", turn.name), loss, size)
    run.engine.backward_for(loss, control.loss_scale, turn.parameters)
    turn.window += 1
    if not control.holds_step or run.is_last_batch:
        close_turn(run, several, turn)
    several.put_down(run)


def close_turn(run: TrainRun, several: Round, turn: Turn) -> None:
    """Step one of several optimizers with its window; the first step of a round counts for all of them."""
    several.pick_up(run, turn)
    run.agreement.note_turn(turn.name)
    run.engine.exchange_gradients(turn.parameters)
    several.has_closed = True
    if stepped(run):
        run.progress.steps += not several.has_stepped
        several.has_stepped = True
        run.hot.step_end.emit(run, STEP_END)
    run.control.drops_step = False
    turn.window = 0
    run.zero_grad()


def close_windows(run: TrainRun) -> None:
    """Step with all gradients that are left."""
    if run.round is None:
        close_window(run)
    else:
        close_round(run, run.round)


def close_round(run: TrainRun, several: Round) -> None:
    """Step the optimizers that gradients are left for, none of the last batch's losses being theirs; end the round."""
    for turn in several.unfinished():
        close_turn(run, several, turn)
    several.put_down(run)
    run.progress.skipped_steps += several.close()


def open_batch(run: TrainRun) -> None:
    """Ask what is to become of the batch in hand."""
    control = run.control
    control.stage = "BatchStart"
    run.hot.batch_start.emit(run, BATCH_START)
    control.stage = ""
    run.agreement.settle_batch()
    if control.holds_step and not run.is_last_batch:
        run.open_contexts.enter_context(run.engine.no_sync())


def settle_batch(run: TrainRun) -> None:
    """Finish a batch about which something was asked; a skipped one still ends the window that it should have ended."""
    control, several = run.control, run.round
    run.open_contexts.close()
    if control.skips_batch:
        run.progress.skipped_batches += 1
    if several is not None:
        several.taken.clear()
    if (several is not None or (control.skips_batch and run.window)) and (not control.holds_step or run.is_last_batch):
        close_windows(run)


def boundary(run: TrainRun) -> None:
    """Serve what was asked for, give the last word to `ShouldStop`, then decide whether to leave."""
    control, should_stop = run.control, run.hot.should_stop
    run.agreement.settle()
    if pending := control.pending:
        serve(run)
    if run.in_boundary:  # a resumed run stands where its state was saved
        run.in_boundary = False
        control.release()
    if should_stop.chain:
        control.stage = "ShouldStop"
        should_stop.emit(run, SHOULD_STOP)
        control.stage = ""
    run.agreement.conclude(served=pending)
    control.decide()


def serve(run: TrainRun) -> None:
    """Log, validate and save, in this order, each where it is asked for; what comes up meanwhile is served too."""
    if run.control.take("next_phase") and not run.data.is_last_phase:
        run.data.advances = True
        if run.progress.batch:
            run.control.end_epoch("the next phase was asked for", by="the loop")
        else:  # between epochs, where none has to end for it
            run.data.advance()
    if run.control.take("log"):
        log(run)
        run.agreement.settle()
    if run.control.take("validation"):
        run.progress.validations += evaluate(run, "validation")
        run.agreement.settle()
    if run.control.take("save"):
        save(run)


def save(run: TrainRun) -> None:
    """Let plugins store the run; of the boundary, only `ShouldStop` is left for a run that resumes from here."""
    before, run.at_save_point = run.at_save_point, not run.finished
    run.emit(ev.SavePoint())
    run.at_save_point = before


def log(run: TrainRun) -> None:
    """Read the means since the last log and tell them."""
    event = ev.Log(Metrics(run.means.read(run.phase)))
    run.emit(event)
    run.metrics.update(event.metrics)


def evaluate(run: TrainRun, phase: ev.Phase) -> bool:
    """Run every validation or test set in eval mode, without gradients, and tell the means, unless it is cut short."""
    start, batch_start, batch_end, end = EVALUATIONS[phase]
    before, after, control = run.bus.signal(batch_start), run.bus.signal(batch_end), run.control
    with evaluating(run, phase) as evaluation:
        control.stage = EVALUATION
        run.emit(start())
        for dataset, run.batch in evaluation.feed():
            if before.chain:
                before.emit(run, batch_start(dataset))
            evaluation.step(run.batch)
            if after.chain:
                after.emit(run, batch_end(dataset))
        control.stage = ""
        run.agreement.settle_validation()
        if cut := control.close_validation():
            cut_short(run, cut)
        else:
            event = end(Metrics(evaluation.metrics()))
            run.emit(event)
            run.metrics.update(event.metrics)
    return cut is None


def cut_short(run: TrainRun, cut: Request) -> None:
    """Tell that a validation or test was left before its end; one that no training follows stops the run."""
    run.emit(ev.ValidationCut(cut.reason))
    if run.finished or not run.started:
        if not run.control.should_stop:
            run.control.stop(cut.reason, by=cut.by)
        run.control.decide()


def close_epoch(run: TrainRun) -> None:
    """End the epoch; one that a stop cut short, or its validation, stays open, for a resumed run to finish."""
    control, progress = run.control, run.progress
    abandon(run)
    if run.window and not control.turns_back:
        close_windows(run)
        control.close_batch()
    if control.turns_back:
        return
    run.loss = run.batch = None
    if run.round is not None:
        run.round.clear()
    if control.keeps_epoch_open:
        return
    if not (run.exhausted or run.is_last_batch or control.should_end_epoch):
        refuse_unread(run)
        return
    control.close_epoch()
    run.exhausted = run.last_seen = False
    progress.earlier_batches += progress.batch
    progress.epoch, progress.batch, run.epoch_begun = progress.epoch + 1, 0, False
    run.data.advance()
    run.emit(ev.EpochEnd(progress.epoch - 1))
    boundary(run)


def finish(run: TrainRun) -> None:
    """Tell that the training is over, and serve what that brings up."""
    run.finished = True
    run.emit(ev.TrainEnd())
    run.agreement.settle()
    serve(run)
    run.agreement.settle()
    serve(run)  # what the validation asked for too late


def end(run: TrainRun, error: BaseException | None) -> Iterator[tuple[str, str, BaseException]]:
    """Tell of a failure, then close; every handler runs. Yield (plugin, event, error) of each that fails, at once."""
    failure = [] if error is None else [ev.RunFailed(error, run.phase, *run.blame(error))]
    for event in (*failure, ev.RunClosed(run.status)):
        run.control.stage = type(event).__name__
        for owner, other in run.bus.signal(type(event)).emit_each(run, event):
            yield owner, event.name, other
