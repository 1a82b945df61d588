"""The early end of a run that fails or exits, or of a loop of your own that is left; what its errors say of it.

And what a run left undone, in words: steps that it skipped, handlers that it never called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isfinite

from ..events import Progress
from ..events import catalogue as ev
from ..events.errors import count, error_text
from . import loop
from .context import RunContext
from .epoch_end import finish_left_batch
from .result import RunResult
from .settings import unmet_needs
from .system.errors import add_run_note

FEW = 5  # so many skipped steps need no word, nor does one of a hundred: the scale of fp16 is found by skipping
OF_BATCHES = frozenset({ev.BatchStart, ev.BatchEnd, ev.ShouldStop})
OF_VALIDATIONS = frozenset({ev.ValidationBatchStart, ev.ValidationBatchEnd})


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
    if run.report.has_left_group or error is run.control.agreed:
        return error, None
    run.report.has_left_group = True
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
    if run.settings.train and run.checkpoints.last is not None:
        add_run_note(error, f"the training had ended, and its newest checkpoint is {run.checkpoints.last}")


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
        if run.report.started:
            loop.finish(run)
    except BaseException as error:  # noqa: BLE001  # fails the run like any other; raised by close_run
        return error
    return None


def no_step(run: RunContext) -> str:
    """Return the warning of a run that made no optimizer step."""
    progress, skips = run.progress, run.control.skips
    who = f" Who skipped: {run.control.who_skipped()}." if skips.count else ""
    batches, steps = progress.skipped_batches, progress.skipped_steps
    skipped = [count(batches, "batch", "batches")] * bool(batches) + [count(steps, "step", "steps")] * bool(steps)
    return (
        f"The run made no optimizer step, so nothing was trained. It had {count(progress.batches, 'batch', 'batches')}"
        f"{', skipped: ' * bool(skipped)}{' and '.join(skipped)}.{who}"
    )


def left_undone(run: RunContext) -> Iterator[str]:
    """Yield what plugins left undone, what was skipped, and what was lost."""
    yield from _disabled(run)
    yield from _uncalled(run)
    yield from _skipped(run)
    yield from _unread_validation(run)
    yield from _not_finite(run)
    yield from _unwritten(run)


def _disabled(run: RunContext) -> Iterator[str]:
    """Say what a plugin that is disabled would have asked for, where no other does and something needs it."""
    off = run.plugins.declared("asks", enabled=False)
    for word, name in unmet_needs(run.settings, run.plugins):
        if word in off and word != "stop":
            what = "stepped the scheduler" if word == "scheduler" else f"asked for a {word}"
            so = "" if name is None else f", so {name!r} could not act"
            yield f"While plugin {off[word]!r} was disabled, no plugin {what}{so}."


def _uncalled(run: RunContext) -> list[str]:
    """Return the handlers that were not called; the rest of a resumed run may be too short for some."""
    if run.checkpoints.resumed_at is not None and run.progress.epoch <= run.checkpoints.resumed_at.epoch + 1:
        return []
    progress, emitted = run.progress, set(run.report.emitted)
    for happened, events in (
        (progress.batches, OF_BATCHES),
        (progress.batches - progress.skipped_batches, {ev.ForwardEnd, ev.BackwardEnd}),
        (progress.steps, {ev.StepEnd}),
        (progress.steps + progress.skipped_steps, {ev.GradientsReady}),
        (ev.ValidationStart in emitted, OF_VALIDATIONS),
    ):
        emitted |= events if happened else set()
    return run.plugins.uncalled(emitted, run.note)


def _skipped(run: RunContext) -> Iterator[str]:
    before, now, history = run.checkpoints.resumed_at or Progress(), run.progress, run.control.history
    steps = now.steps - before.steps + (skipped := now.skipped_steps - before.skipped_steps)
    batches, left_out = now.batches - before.batches, now.skipped_batches - before.skipped_batches
    for verb, what, number, of in (
        ("skip_step", "optimizer steps", skipped, steps),
        ("skip_batch", "batches", left_out, batches),
    ):
        if now.steps and number > max(FEW, of // 100):
            by = Counter(request.by for request in history if request.verb == verb)
            by["the engine"] = number - by.total()
            names = ", ".join(f"{name} ({times})" for name, times in by.most_common() if times > 0)
            yield f"{number} of {of} {what} were skipped, by {names}."


def _unread_validation(run: RunContext) -> Iterator[str]:
    if run.settings.evaluations and not run.progress.validations:
        by = run.plugins.declared("asks").get("validation")
        remedy = (
            "" if by is None else f" Plugin {by!r} asks for it: let it do so earlier, as ValidationSchedule(steps=10)."
        )
        yield f"The validation set was never read: no validation was due before the run ended.{remedy}"


def _not_finite(run: RunContext) -> Iterator[str]:
    lost = [
        f"{name} is {value}" for name, value in run.metrics.items() if name.endswith("loss") and not isfinite(value)
    ]
    if lost:
        yield f"At the end, {' and '.join(lost)}: the training is lost. Find where it began with NaNGuard('raise')."


def _unwritten(run: RunContext) -> Iterator[str]:
    if ev.SavePoint in run.report.emitted and not run.plugins.writes_saves():
        from .snapshot import unwritten

        yield from unwritten(run)
