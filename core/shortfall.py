"""What was asked of a training and did not happen: the warnings of its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isfinite
from typing import Any

from ..events import Progress
from ..events import catalogue as ev
from ..events.errors import count
from .context import RunContext
from .host import is_preempted
from .settings import unmet_needs

FEW = 5  # so many skipped steps need no word, nor does one of a hundred: the scale of fp16 is found by skipping
NAMED = 5  # so many parameters are named
MEND = "Freeze them with requires_grad_(False), or pass allow_unused_parameters=True to fit."
OF_BATCHES = frozenset({ev.BatchStart, ev.BatchEnd, ev.ShouldStop})
OF_VALIDATIONS = frozenset({ev.ValidationBatchStart, ev.ValidationBatchEnd})


def warn_of_shortfall(run: RunContext) -> None:
    """Compare what was asked for with what happened, and say the difference in the warnings of the result.

    Nothing of it waits for the device. What only plugins know they say themselves, with `run.warn`.
    """
    warn_of_closing(run)
    if run.phase == "train" and not run.progress.steps and not (run.control.stopped and not run.progress.batches):
        run.warn(_no_step(run))
    if ev.EpochStart not in run.outcome.emitted or is_preempted(run):  # which a resumed run continues
        return
    for sentence in (
        *_disabled(run),
        *_unread_validation(run),
        *_uncalled(run),
        *_skipped(run),
        *_not_finite(run),
        *_unwritten(run),
        *_without_gradient(run),
        *_without_optimizer(run),
    ):
        run.warn(sentence)


def warn_of_closing(run: RunContext) -> None:
    """Say which observers failed, unless it is said, and what was requested when it was too late."""
    for sentence in _due(run):
        run.warn(sentence)
    for name, errors in run.plugins.errors().items():
        if not any(f"Plugin {name!r}" in said for said in run.warnings):
            run.warn(f"Plugin {name!r} failed, and the run continued: {errors[-1].removesuffix('.')}.")


def _no_step(run: RunContext) -> str:
    from ..events.skips import who_skipped

    progress, skips = run.progress, run.control.skips
    who = f" Who skipped: {who_skipped(skips, run.control.history)}." if skips.count else ""
    batches, steps = progress.skipped_batches, progress.skipped_steps
    skipped = [count(batches, "batch", "batches")] * bool(batches) + [count(steps, "step", "steps")] * bool(steps)
    return (
        f"The run made no optimizer step, so nothing was trained. It had {count(progress.batches, 'batch', 'batches')}"
        f"{', skipped: ' * bool(skipped)}{' and '.join(skipped)}.{who}"
    )


def _disabled(run: RunContext) -> Iterator[str]:
    """Say what a plugin that is disabled would have asked for, where no other does and something needs it."""
    off = run.plugins.declared("asks", enabled=False)
    for word, name in unmet_needs(run.settings, run.plugins):
        if word in off and word != "stop":
            what = "stepped the scheduler" if word == "scheduler" else f"asked for a {word}"
            so = "" if name is None else f", so {name!r} could not act"
            yield f"While plugin {off[word]!r} was disabled, no plugin {what}{so}."


def _unread_validation(run: RunContext) -> Iterator[str]:
    if run.settings.evaluations and not run.progress.validations:
        by = run.plugins.declared("asks").get("validation")
        mend = (
            "" if by is None else f" Plugin {by!r} asks for it: let it do so earlier, as ValidationSchedule(steps=10)."
        )
        yield f"The validation set was never read: no validation was due before the run ended.{mend}"


def _uncalled(run: RunContext) -> list[str]:
    """Return the handlers that were not called; the rest of a resumed run may be too short for some."""
    if run.resumed_at is not None and run.progress.epoch <= run.resumed_at.epoch + 1:
        return []
    progress, emitted = run.progress, set(run.outcome.emitted)
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
    before, now, history = run.resumed_at or Progress(), run.progress, run.control.history
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


def _not_finite(run: RunContext) -> Iterator[str]:
    lost = [
        f"{name} is {value}" for name, value in run.metrics.items() if name.endswith("loss") and not isfinite(value)
    ]
    if lost:
        yield f"At the end, {' and '.join(lost)}: the training is lost. Find where it began with NaNGuard('raise')."


def _unwritten(run: RunContext) -> Iterator[str]:
    if ev.SavePoint in run.outcome.emitted and not run.plugins.writes_saves():
        from .snapshot import unwritten

        yield from unwritten(run)


def _due(run: RunContext) -> Iterator[str]:
    for verb, request in run.control.open_requests().items():
        if verb in ("log", "validation", "save"):
            yield f"A {verb} was still due when the run ended, requested by {request.by}: {request.reason}."


def _without_optimizer(run: RunContext) -> Iterator[str]:
    if run.settings.allow_unused_parameters:
        return
    held = {
        id(each)
        for optimizer in run.optimizers.values()
        for group in optimizer.param_groups
        for each in group["params"]
    }
    missing = [name for name, each in _parameters(run) if each.requires_grad and id(each) not in held]
    if missing:
        yield f"{_named(missing)} require gradients and are in no optimizer, so they were not trained. {MEND}"


def _without_gradient(run: RunContext) -> Iterator[str]:
    if run.progress.steps == (run.resumed_at or Progress()).steps:
        return
    names = {id(each): name for name, each in _parameters(run)}
    for window in run.stepping.by_name.values():
        # those of a module that was replaced are none of the task's
        missing = [names[id(each)] for each in window.without_gradient or () if id(each) in names]
        if missing:
            yield f"{_named(missing)} never had a gradient, and were not trained. {MEND}"
        elif window.without_gradient is None and run.stepping.is_named:
            yield f"The optimizer {window.name!r} was never stepped: training_step yielded no loss for it."


def _parameters(run: RunContext) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of the task with their names; of several modules these begin with the module's."""
    for owner, module in run.modules.items():
        for name, parameter in module.named_parameters():
            yield (f"{owner}.{name}" if len(run.modules) > 1 else name), parameter


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{len(names)} parameters ({', '.join(names[:NAMED])}{more})"
