"""The end of an epoch: the loader was exhausted, or the loop over its batches was left."""

from __future__ import annotations

from .context import RunContext

READ_ONCE = "A generator can be read only once: give a list, a DataLoader, or an object whose __iter__ starts again."


def check_exhausted(run: RunContext) -> None:
    """Record that the loader was exhausted. Raise or warn if that happened too early.

    A loader that yields no batch in a later epoch, such as a generator, ends the run.
    """
    if run.progress.batch >= run.last_batch:
        return
    batch, expected, is_shared = run.progress.batch, run.data.length, run.control.is_shared
    if batch == 0 and run.progress.batches and (expected is None or not is_shared):
        _stop_without_data(run)
        return
    if batch == 0:
        where = " on one of the ranks" if is_shared else ""
        raise ValueError(f"The train loader yielded no batch in epoch {run.progress.epoch}{where}. {READ_ONCE}")
    origin = run.origin.batch if run.origin.epoch == run.progress.epoch else 0  # a resumed run may start after the end
    if expected is not None and batch != max(expected, origin):
        text = f"The train loader ended after {batch} batches, but its length says {expected}."
        if is_shared and batch < expected:
            raise ValueError(f"{text} On several ranks this is an error: the other ranks wait for the missing batches.")
        run.warn(text)
    run.work.is_exhausted = True


def epoch_has_ended(run: RunContext) -> bool:
    """Return True if the epoch has ended, False if the run ends within it.

    Raises:
        RuntimeError: the user's own loop did not read the batches of the epoch, so it would never end.
    """
    if run.work.is_exhausted or run.data.is_last_batch or run.control.should_end_epoch:
        if not run.progress.batch:
            run.control.count_skip(None)
        return True
    if run.control.stopped or run.is_complete:
        return False
    raise RuntimeError("The epoch was not trained: loop over run.batches() within run.epochs().")


def finish_abandoned_batch(run: RunContext) -> None:
    """Finish the batch at which the user's own loop was left, which ends the epoch."""
    control, work = run.control, run.work
    work.autocast.close()
    if not work.in_hand:
        return
    reason = "the loop over the batches was left"
    control.end_epoch(reason, by="the caller")
    if work.is_unstepped:
        work.is_unstepped = False
        control.leave_out_batch(reason)
    control.leaving = True
    for _ in work.batches:
        raise AssertionError("a batch after control.leaving")


def _stop_without_data(run: RunContext) -> None:
    # All ranks stop together.
    progress = run.progress
    run.control.stop(f"the data ended: the train loader yielded no batch in epoch {progress.epoch}", by="the loop")
    run.control.decide()
    run.warn(f"The train loader yielded no batch in epoch {progress.epoch}, so the run ended early. {READ_ONCE}")
