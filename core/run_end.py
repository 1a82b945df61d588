"""The end of a run: its status, exit status, last events, errors, result and warnings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import isfinite
from time import perf_counter
from typing import Any

from ..events import Progress, Status
from ..events import catalogue as ev
from ..events.checks import describe_error, place_of
from . import loop
from .context import RunContext
from .host import is_preempted
from .result import ResumeReport, RunResult
from .stepping.windows import held_parameters

Failures = list[tuple[str, str, BaseException]]  # owner, event, error
EXIT_STATUSES = {"interrupted": 130, "failed": 1}  # as shells and Python report an interrupt and an exception
MAX_NAMES = 5  # parameters listed in a warning
REMEDY = "Freeze them with requires_grad_(False), or pass allow_unused_parameters=True to fit."


def close_run(run: RunContext, error: BaseException | None) -> None:
    """Emit the closing events, set `run.result`, and raise the error unless it already propagates.

    On several ranks, an error is first reported to the other ranks and the group is left: no collective follows.
    """
    passing, secondary = error, Failures()
    if error is not None or (run.phase == "train" and not run.report.finished):
        from .early_end import end_early

        error = end_early(run, error)
    run.report.finished = True
    if run.modes is not None and (
        error is None or isinstance(error, KeyboardInterrupt)
    ):  # else the device may have failed
        run.modes.eval()
    owner, event = (None, None) if error is None else run.blame(error)
    where = place_of(run) + ("" if owner is None else f"; in {owner} on {event}")
    if error is not None:
        error = _leave(run, error, where, secondary)
    else:
        warn_of_shortfall(run)
    run.report.status = _status(run, error)
    secondary = _close_all(run, error, secondary)
    if error is None and secondary:
        owner, event, error = secondary.pop(0)
        where += f"; in {owner} on {event}"
        run.report.status = _status(run, error)
        from .early_end import note_newest_checkpoint

        note_newest_checkpoint(run, error)
    warn_of_closing(run)
    run.modes = None  # frees the weights
    run.bus.blamed = None  # frees the traceback, and with it the batch
    run.report.result = _result(run, error)
    if error is None:
        return
    error.add_note(f"heliograph: {where}")
    for owner, event, failure in secondary:
        error.add_note(f"heliograph: then {owner} failed on {event}: {describe_error(failure)}")
    if run.hooks.replacement is not None and run.hooks.replacement is not error:
        raise run.hooks.replacement from error
    if error is not passing:
        raise error


def _close_all(run: RunContext, error: BaseException | None, of_leaving: Failures) -> Failures:
    """Close everything that was opened, even if some of it fails; return all failures, a Ctrl-C first.

    Raises:
        KeyboardInterrupt: the second one; then the remaining objects are not closed.
    """
    run.bus.interrupted = isinstance(error, KeyboardInterrupt)
    failures: Failures = []

    def add(owner: str, event: str, failure: BaseException) -> None:
        cause = _leave(run, failure, f"{place_of(run)}; in {owner} on {event}", of_leaving)
        failures.append((owner, event, cause))

    try:
        for owner, event, failure in loop.end(run, error):
            add(owner, event, failure)
        for owner, failure in run.plugins.close():
            add(owner, "close", failure)
        for close in (partial(_finish_together, run), run.hooks.closing.close):
            try:
                close()
            except BaseException as failure:
                if run.bus.is_second_interrupt(failure):
                    raise
                add("the run", "close", failure)
    except BaseException as interrupt:
        _leave(run, interrupt, place_of(run), of_leaving)
        raise
    finally:
        run.plugins.free()
    return sorted(failures + of_leaving, key=lambda failure: not isinstance(failure[2], KeyboardInterrupt))


def _status(run: RunContext, error: BaseException | None) -> Status:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if error is not None:
        return "failed"
    return "stopped" if run.control.stopped else "completed"


def _resume(run: RunContext) -> ResumeReport:
    facts, checkpoints, resumed_at = run.data.resume_facts(), run.checkpoints, run.checkpoints.resumed_at
    report = ResumeReport(
        dict(facts.untracked),
        tuple(text for text in facts.differences if text != checkpoints.difference),
        facts.position,
    )
    if resumed_at is None:
        return report
    return replace(
        report,
        path=checkpoints.resumed_from,
        epoch=resumed_at.epoch,
        batch=resumed_at.batch,
        step=resumed_at.steps,
        verified_steps=checkpoints.verified_steps,
        verified_before=checkpoints.verified_before,
        divergence=checkpoints.difference,
        unverified=checkpoints.unverified,
        restored=tuple(checkpoints.restored),
        edited=tuple(checkpoints.edited),
        fresh_plugins=checkpoints.fresh_plugins,
        unclaimed_states=checkpoints.unclaimed_states,
        world_sizes=(checkpoints.before[0] if checkpoints.before else run.engine.world_size, run.engine.world_size),
    )


def _result(run: RunContext, error: BaseException | None) -> RunResult:
    stop = run.control.stop_request if run.report.status == "stopped" else None
    return RunResult(
        status=run.report.status,
        reason=run.report.reason(error),
        stopped_by=None if stop is None else stop.by,
        stopped_on_rank=None if stop is None else stop.rank,
        progress=run.progress.copy(),
        metrics=dict(run.metrics),
        **({} if run.report.rows is None else run.report.rows.as_results(run)),
        best_checkpoint=run.checkpoints.best,
        last_checkpoint=run.checkpoints.last,
        recording=run.report.recording,
        history=run.control.history,
        seconds=perf_counter() - run.report.began,
        exit_status=EXIT_STATUSES.get(run.report.status, run.hooks.exit_status or 0),
        resume=_resume(run) if run.settings.train else None,
        notes=tuple(run.report.notes),
        warnings=tuple(run.report.warnings),
        plugin_errors=run.plugins.errors(),
        plugin_seconds=dict(run.report.plugin_seconds),
        predictions=run.report.predictions,
    )


def _leave(run: RunContext, error: BaseException, where: str, failures: Failures) -> BaseException:
    from .early_end import leave_group

    return leave_group(run, error, where, failures)


def _finish_together(run: RunContext) -> None:
    """If nothing failed, end together with the other ranks: remove wrappers, agree on exit status and warnings."""
    if run.report.has_left_group:
        return
    if run.report.rows is not None and run.settings.train:
        run.report.rows.finish(run)
    run.engine.tear_down()
    run.control.agree_on_exit_status()
    if run.control.is_shared:
        local_warnings = tuple(run.report.warnings)
        for rank, warnings in enumerate(run.engine.gather_objects(local_warnings)):
            for text in warnings:
                run.warn(text if text in local_warnings else f"On rank {rank}: {text}")


def warn_of_shortfall(run: RunContext) -> None:
    """Compare what the user requested with what happened, and add the differences to the warnings of the result.

    Does not wait for the device. Plugins add their own warnings with `run.warn`.
    """
    warn_of_closing(run)
    if run.phase == "train" and not run.progress.steps and not (run.control.stopped and not run.progress.batches):
        from .shortfall import no_step_warning

        run.warn(no_step_warning(run))
    if ev.EpochStart not in run.report.emitted or is_preempted(run):  # a resumed run continues it
        return
    losses = [value for name, value in run.metrics.items() if name.endswith("loss")]
    skipped, saved = run.progress.skipped_steps or run.progress.skipped_batches, ev.SavePoint in run.report.emitted
    if len(run.plugins) or skipped or saved or run.settings.evaluations or not all(map(isfinite, losses)):
        from .shortfall import shortfall_warnings  # imported when there are plugins

        for sentence in shortfall_warnings(run):
            run.warn(sentence)
    if saved and not run.plugins.writes_saves():
        from .snapshot import unwritten

        for sentence in unwritten(run):
            run.warn(sentence)
    for sentence in (*_without_gradient(run), *_without_optimizer(run)):
        run.warn(sentence)


def warn_of_closing(run: RunContext) -> None:
    """Warn about failed observers without a warning yet, and about requests that came too late."""
    for sentence in _unserved_requests(run):
        run.warn(sentence)
    for name, errors in run.plugins.errors().items():
        if not any(f"Plugin {name!r}" in warning for warning in run.report.warnings):
            run.warn(f"Plugin {name!r} failed, and the run continued: {errors[-1].removesuffix('.')}.")


def _unserved_requests(run: RunContext) -> Iterator[str]:
    for verb, request in run.control.open_requests().items():
        if verb in ("log", "validation", "save"):
            yield f"A {verb} was still pending when the run ended, requested by {request.by}: {request.reason}."


def _without_optimizer(run: RunContext) -> Iterator[str]:
    if run.settings.allow_unused_parameters:
        return
    optimized = set[int]().union(*map(held_parameters, run.optimizers.values()))
    missing = [
        name for name, parameter in _parameters(run) if parameter.requires_grad and id(parameter) not in optimized
    ]
    if missing:
        yield f"{_named(missing)} require gradients and are in no optimizer, so they were not trained. {REMEDY}"


def _without_gradient(run: RunContext) -> Iterator[str]:
    if run.progress.steps == (run.checkpoints.resumed_at or Progress()).steps:
        return
    names = {id(parameter): name for name, parameter in _parameters(run)}
    for window in run.stepping.by_name.values():
        # The parameters of a module that was replaced are not in the task.
        missing = [names[id(parameter)] for parameter in window.without_gradient or () if id(parameter) in names]
        if missing:
            yield f"{_named(missing)} never had a gradient, so they were not trained. {REMEDY}"
        elif window.without_gradient is None and run.stepping.is_named:
            yield f"The optimizer {window.name!r} was never stepped: training_step yielded no loss for it."


def _parameters(run: RunContext) -> Iterator[tuple[str, Any]]:
    """Yield the names and parameters of the task; with several modules, a name begins with the module's."""
    for owner, module in run.modules.items():
        for name, parameter in module.named_parameters():
            yield (f"{owner}.{name}" if len(run.modules) > 1 else name), parameter


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{len(names)} parameters ({', '.join(names[:MAX_NAMES])}{more})"
