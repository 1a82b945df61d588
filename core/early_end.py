"""The early end of a run that fails or exits, or of a loop of your own that is left; what its errors say of it."""

from __future__ import annotations

from ..events.errors import error_text
from . import loop
from .context import RunContext
from .epoch_end import finish_left_batch
from .result import RunResult
from .system.errors import add_run_note


def end_early(run: RunContext, error: BaseException | None) -> BaseException | None:
    """Return the error that ends a run; without one, finish the run, and return what fails in that."""
    if error is None:
        return _finish_early(run)
    if isinstance(error, RuntimeError) and error_text(error).startswith(NO_GRADIENT):
        _explain_loss(run, error)
    return _unwrap(error)


NO_GRADIENT = "element 0 of tensors does not require grad"  # what torch says of a loss that leads to no weight


def _explain_loss(run: RunContext, error: RuntimeError) -> None:
    """Add to torch's error why a loss has no gradient, where it is the one of the training step."""
    loss = run.loss
    if run.phase != "train" or loss is None or loss.requires_grad:
        return
    if any(each.requires_grad for module in run.modules.values() for each in module.parameters()):
        why = (
            "leads back to no weight: return it as computed, without detach(), item(), no_grad() or a new tensor "
            "made of it"
        )
    else:
        why = "can train nothing, as all parameters of the task are frozen: requires_grad_(True) for some of them"
    error.add_note(f"heliograph: the loss that {type(run.task).__name__}.training_step returned {why}")


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


def note_newest(run: RunContext, error: BaseException) -> None:
    """Add to an error that came up when a training had ended, such as that of an export, what is saved of it."""
    if run.settings.train and run.last_checkpoint is not None:
        add_run_note(error, f"the training had ended, and its newest checkpoint is {run.last_checkpoint}")


def as_exit(status: int, result: RunResult) -> SystemExit:
    """Return what leaves `fit` with an exit status that a plugin asked for; nobody reads the result then."""
    leaving = SystemExit(status)
    for text in (*result.notes, *result.warnings):
        add_run_note(leaving, text)
    return leaving


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
        run.control.agree()
        run.control.decide()
        if run.outcome.started:
            loop.finish(run)
    except BaseException as error:  # noqa: BLE001  # fails the run like any other; raised by close_run
        return error
    return None
