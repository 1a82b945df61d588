"""The early end of a run that fails, or of a loop of your own that is left; a run that ends without a step."""

from __future__ import annotations

from ..events.errors import error_text
from ..events.skips import who_skipped
from . import loop
from .context import RunContext
from .epoch_end import finish_left_batch


def end_early(run: RunContext, error: BaseException | None) -> BaseException | None:
    """Return the error that ends a run; without one, finish the run, and return what fails in that."""
    return _finish_early(run) if error is None else _unwrap(error)


def leave_group(run: RunContext, error: BaseException, place: str) -> tuple[BaseException, BaseException | None]:
    """Leave the group at once, for an error that not all ranks share; the others are informed before.

    Args:
        run: the run.
        error: why.
        place: where in the run it came up.

    Returns:
        What caused the error: itself, or that another rank failed; and what failed in leaving, if anything did.
    """
    if run.outcome.has_left_group or error is run.control.agreed:
        return error, None
    run.outcome.has_left_group = True
    cause, watch = error, run.engine.watch
    try:
        if watch is not None:
            cause = watch.explain(error)
            if cause is error:
                watch.announce(error, place)
            from .distributed.ranks.failure import release_groups

            release_groups(error)
        try:
            for act in run.hooks.leaving:
                act()
        finally:
            run.engine.abandon()
    except BaseException as failure:  # noqa: BLE001  # joins those of the closing; the error itself matters more
        return cause, failure
    return cause, None


def warn_of_no_step(run: RunContext) -> None:
    """Warn of a training that made no optimizer step, unless it was stopped before its first batch."""
    progress = run.progress
    if run.control.stopped and not progress.batches:
        return
    skips = run.control.skips
    who = f" Who skipped: {who_skipped(skips, run.control.history)}." if skips.count else ""
    run.warn(
        f"The run made no optimizer step, so nothing was trained. Of its {progress.batches} batches, "
        f"{progress.skipped_batches} were skipped, and {progress.skipped_steps} steps.{who}"
    )


def _unwrap(error: BaseException) -> BaseException:
    """Return a StopIteration of user code as it was raised: crossing one of our generators had wrapped it (PEP 479)."""
    cause = error.__cause__
    if isinstance(cause, StopIteration) and error_text(error) == "generator raised StopIteration":
        return cause
    return error


def _finish_early(run: RunContext) -> BaseException | None:
    """Finish a run whose own loop was left before its end."""
    try:
        finish_left_batch(run)
        if run.control.is_rolling_back:
            run.control.discard_epoch()
        run.control.stop("the loop over the epochs was left", by="the caller")
        run.control.decide()
        if run.outcome.started:
            loop.finish(run)
    except BaseException as error:  # noqa: BLE001  # fails the run like any other; raised by close_run
        return error
    return None
