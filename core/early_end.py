"""The early end of a run, which failed, exits or was left by the user's own loop; and warnings of unfinished work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isfinite
from typing import Any

from ..events import Progress
from ..events import catalogue as ev
from ..events.checks import count, error_text
from . import loop
from .context import RunContext
from .epoch_end import finish_abandoned_batch
from .result import RunResult
from .settings import unmet_needs
from .system.errors import add_run_note

NO_GRADIENT = "element 0 of tensors does not require grad"  # begins torch's error for a loss without a graph
UNREPORTED_SKIPS = 5  # skips are not reported up to this number, or up to 1 %: fp16 finds its loss scale by skipping
BATCH_EVENTS = frozenset({ev.BatchStart, ev.BatchEnd, ev.ShouldStop})
VALIDATION_BATCH_EVENTS = frozenset({ev.ValidationBatchStart, ev.ValidationBatchEnd})


def end_early(run: RunContext, error: BaseException | None) -> BaseException | None:
    """Return the error that ends a run. Without one, finish the run and return the error of that, if any."""
    if error is None:
        return _finish_early(run)
    if isinstance(error, RuntimeError) and error_text(error).startswith(NO_GRADIENT):
        _explain_loss(run, error)
    if isinstance(error, MemoryError | RuntimeError):
        from .memory_report import explain_out_of_memory  # imported after an error

        explain_out_of_memory(run, error)
    return _unwrap_stop_iteration(error)


def _explain_loss(run: RunContext, error: RuntimeError) -> None:
    loss = run.loss
    if run.phase != "train" or loss is None or loss.requires_grad:
        return
    if any(parameter.requires_grad for module in run.modules.values() for parameter in module.parameters()):
        why = "depends on no parameter: return it as computed, without detach(), item(), no_grad() or a new tensor"
    else:
        why = "can train nothing because all parameters of the task are frozen: call requires_grad_(True) on some"
    error.add_note(f"heliograph: the loss that {type(run.task).__name__}.training_step returned {why}")


def leave_group(run: RunContext, error: BaseException, place: str, failures: list[Any]) -> BaseException:
    """Leave the group at once after an error that not all ranks share; inform the other ranks first.

    Args:
        run: the run.
        error: the error.
        place: where in the run it occurred.
        failures: gets the error of leaving, if any, as (owner, event, error).

    Returns:
        The cause, which is the error itself or a failure of another rank.
    """
    if run.report.has_left_group or error is run.control.agreed:
        return error
    run.report.has_left_group = True
    cause, watch = error, run.engine.watch
    try:
        if watch is not None:
            cause = watch.explain(error)
            if cause is error:
                watch.announce(error, place)
            from .distributed.collective_errors import release_groups

            release_groups(error)
        try:
            for act in run.hooks.leaving:
                act()
        finally:
            run.engine.abandon()
    except BaseException as failure:  # noqa: BLE001  # reported with the errors of closing
        failures.append(("the run", "leaving the group", failure))
    return cause


def note_newest_checkpoint(run: RunContext, error: BaseException) -> None:
    if run.settings.train and run.checkpoints.last is not None:
        add_run_note(error, f"the training was complete; its newest checkpoint is {run.checkpoints.last}")


def system_exit(status: int, result: RunResult) -> SystemExit:
    # The notes and warnings go with the exit because the caller gets no result.
    error = SystemExit(status)
    for text in (*result.notes, *result.warnings):
        add_run_note(error, text)
    return error


def _unwrap_stop_iteration(error: BaseException) -> BaseException:
    # PEP 479: a StopIteration of user code that crosses one of our generators arrives wrapped in a RuntimeError.
    cause = error.__cause__
    if isinstance(cause, StopIteration) and error_text(error) == "generator raised StopIteration":
        return cause
    return error


def _finish_early(run: RunContext) -> BaseException | None:
    try:
        finish_abandoned_batch(run)
        if run.control.is_rolling_back:
            run.control.discard_epoch()
        run.control.stop("the loop over the epochs was left", by="the caller")
        run.control.agree()
        run.control.decide()
        if run.report.started:
            loop.finish(run)
    except BaseException as error:  # noqa: BLE001  # raised by close_run
        return error
    return None


def no_step_warning(run: RunContext) -> str:
    progress, skips = run.progress, run.control.skips
    who = f" Who skipped: {run.control.who_skipped()}." if skips.count else ""
    batches, steps = progress.skipped_batches, progress.skipped_steps
    skipped = [count(batches, "batch", "batches")] * bool(batches) + [count(steps, "step", "steps")] * bool(steps)
    return (
        f"The run made no optimizer step, so nothing was trained. It had {count(progress.batches, 'batch', 'batches')}"
        f"{', skipped: ' * bool(skipped)}{' and '.join(skipped)}.{who}"
    )


def shortfall_warnings(run: RunContext) -> Iterator[str]:
    yield from _disabled_plugins(run)
    yield from _uncalled_handlers(run)
    yield from _frequent_skips(run)
    yield from _unread_validation(run)
    yield from _non_finite_losses(run)
    yield from _unwritten_saves(run)


def _disabled_plugins(run: RunContext) -> Iterator[str]:
    off = run.plugins.declared("asks", enabled=False)
    for word, name in unmet_needs(run.settings, run.plugins):
        if word in off and word != "stop":
            lack = "stepped the scheduler" if word == "scheduler" else f"requested a {word}"
            effect = "" if name is None else f", so {name!r} could not act"
            yield f"While plugin {off[word]!r} was disabled, no plugin {lack}{effect}."


def _uncalled_handlers(run: RunContext) -> list[str]:
    # The remainder of a resumed run may be too short for some handlers.
    if run.checkpoints.resumed_at is not None and run.progress.epoch <= run.checkpoints.resumed_at.epoch + 1:
        return []
    progress, emitted = run.progress, set(run.report.emitted)
    for happened, events in (
        (progress.batches, BATCH_EVENTS),
        (progress.batches - progress.skipped_batches, {ev.ForwardEnd, ev.BackwardEnd}),
        (progress.steps, {ev.StepEnd}),
        (progress.steps + progress.skipped_steps, {ev.GradientsReady}),
        (ev.ValidationStart in emitted, VALIDATION_BATCH_EVENTS),
    ):
        emitted |= events if happened else set()
    return run.plugins.uncalled(emitted, run.note)


def _frequent_skips(run: RunContext) -> Iterator[str]:
    before, now, history = run.checkpoints.resumed_at or Progress(), run.progress, run.control.history
    steps = now.steps - before.steps + (skipped := now.skipped_steps - before.skipped_steps)
    batches, left_out = now.batches - before.batches, now.skipped_batches - before.skipped_batches
    for verb, unit, number, total in (
        ("skip_step", "optimizer steps", skipped, steps),
        ("skip_batch", "batches", left_out, batches),
    ):
        if now.steps and number > max(UNREPORTED_SKIPS, total // 100):
            by = Counter(request.by for request in history if request.verb == verb)
            by["the engine"] = number - by.total()
            names = ", ".join(f"{name} ({times})" for name, times in by.most_common() if times > 0)
            yield f"{number} of {total} {unit} were skipped, by {names}."


def _unread_validation(run: RunContext) -> Iterator[str]:
    if run.settings.evaluations and not run.progress.validations:
        by = run.plugins.declared("asks").get("validation")
        remedy = "" if by is None else f" Plugin {by!r} requests it: do so earlier, as ValidationSchedule(steps=10)."
        yield f"The validation set was never read: no validation was due before the run ended.{remedy}"


def _non_finite_losses(run: RunContext) -> Iterator[str]:
    lost = [
        f"{name} is {value}" for name, value in run.metrics.items() if name.endswith("loss") and not isfinite(value)
    ]
    if lost:
        yield f"At the end, {' and '.join(lost)}: the training diverged. NaNGuard('raise') finds the first such step."


def _unwritten_saves(run: RunContext) -> Iterator[str]:
    if ev.SavePoint in run.report.emitted and not run.plugins.writes_saves():
        from .snapshot import unwritten

        yield from unwritten(run)
