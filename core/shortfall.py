"""Warnings of what a run was to do and did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

import torch

from ..events import Progress
from ..events import catalogue as ev
from ..events.checks import count
from .engines.options import modules_of
from .settings import unmet_needs
from .stepping.windows import held_parameters

UNREPORTED_SKIPS = 5  # skips are not reported up to this number, or up to 1 %: fp16 finds its loss scale by skipping
BATCH_EVENTS = frozenset({ev.BatchStart, ev.BatchEnd, ev.ShouldStop})
VALIDATION_BATCH_EVENTS = frozenset({ev.ValidationBatchStart, ev.ValidationBatchEnd})


def no_step_warning(run: Any) -> str:
    progress, skips = run.progress, run.control.skips
    who = f" Who skipped: {run.control.who_skipped()}." if skips.count else ""
    batches, steps = progress.skipped_batches, progress.skipped_steps
    skipped = [count(batches, "batch", "batches")] * bool(batches) + [count(steps, "step", "steps")] * bool(steps)
    return (
        f"The run made no optimizer step, so nothing was trained. It had {count(progress.batches, 'batch', 'batches')}"
        f"{', skipped: ' * bool(skipped)}{' and '.join(skipped)}.{who}"
    )


def shortfall_warnings(run: Any) -> Iterator[str]:
    yield from _disabled_plugins(run)
    yield from _uncalled_handlers(run)
    yield from _frequent_skips(run)
    yield from _unread_validation(run)
    yield from _non_finite_losses(run)


def _disabled_plugins(run: Any) -> Iterator[str]:
    off = run.plugins.declared("asks", enabled=False)
    for word, name in unmet_needs(run.settings, run.plugins):
        if word in off and word != "stop":
            lack = "stepped the scheduler" if word == "scheduler" else f"requested a {word}"
            effect = "" if name is None else f", so {name!r} could not act"
            yield f"While plugin {off[word]!r} was disabled, no plugin {lack}{effect}."


def _uncalled_handlers(run: Any) -> Iterator[str]:
    # The remainder of a resumed run may be too short for some handlers.
    if run.checkpoints.resumed_at is not None and run.progress.epoch <= run.checkpoints.resumed_at.epoch + 1:
        return
    progress, emitted = run.progress, set(run.report.emitted)
    for happened, events in (
        (progress.batches, BATCH_EVENTS),
        (progress.batches - progress.skipped_batches, {ev.ForwardEnd, ev.BackwardEnd}),
        (progress.steps, {ev.StepEnd}),
        (progress.steps + progress.skipped_steps, {ev.GradientsReady}),
        (ev.ValidationStart in emitted, VALIDATION_BATCH_EVENTS),
    ):
        emitted |= events if happened else set()
    yield from run.plugins.uncalled(emitted, run.note)


def _frequent_skips(run: Any) -> Iterator[str]:
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


def _unread_validation(run: Any) -> Iterator[str]:
    if run.settings.evaluations and not run.progress.validations:
        by = run.plugins.declared("asks").get("validation")
        remedy = "" if by is None else f" Plugin {by!r} requests it: do so earlier, as ValidationSchedule(steps=10)."
        yield f"The validation set was never read: no validation was due before the run ended.{remedy}"


def _non_finite_losses(run: Any) -> Iterator[str]:
    lost = [
        f"{name} is {value}" for name, value in run.metrics.items() if name.endswith("loss") and not isfinite(value)
    ]
    if lost:
        yield f"At the end, {' and '.join(lost)}: the training diverged. NaNGuard('raise') finds the first such step."


class InitialModules:
    """The parameters of a task before the handlers of `TrainStart` run; the optimizers are made before those."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self._parameters = [parameter for module in modules_of(task).values() for parameter in module.parameters()]

    def check(self, optimizers: Iterable[torch.optim.Optimizer], world_size: int) -> None:
        trained = set(map(id, self._parameters))
        if world_size == 1:
            trained = trained.union(*map(held_parameters, optimizers))
        names = [
            f"{name}.{part}"
            for name, module in modules_of(self._task).items()
            for part, parameter in module.named_parameters()
            if parameter.requires_grad and id(parameter) not in trained
        ]
        if names:
            problem = "are in no optimizer" if world_size == 1 else "have no gradient exchange between the ranks"
            raise ValueError(
                f"A handler of TrainStart added parameters to the task that {problem}: {', '.join(names[:5])}"
                f"{', ...' if len(names) > 5 else ''}. They would not be trained. Change the model before you call "
                f"fit, which creates the optimizer from its parameters, or, in one process, call "
                f"run.optimizer.add_param_group in the handler."
            )
