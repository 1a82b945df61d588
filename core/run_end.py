"""The end of a run: its status and exit status, its last events, its errors, its result."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

from ..events.catalogue import Status
from ..events.errors import describe_error, place_of
from . import loop
from .context import RunContext
from .result import ResumeReport, RunResult
from .shortfall import warn_of_closing, warn_of_shortfall


def close_run(run: RunContext, error: BaseException | None) -> None:
    """Emit the closing events, set `run.result`, and raise where that is not what already passes.

    On several ranks, the others are informed of an error first, and the group is left: no collective follows.
    """
    passing, departure = error, Departure(run)
    if error is not None or (run.phase == "train" and not run.outcome.finished):
        from .early_end import end_early

        error = end_early(run, error)
    run.outcome.finished = True
    where = _where(run, error)
    if error is not None:
        error = departure.fail(error, where)
    else:
        warn_of_shortfall(run)
    run.outcome.status = _status(run, error)
    secondary = _close_all(run, error, departure)
    if error is None and secondary:
        owner, event, error = secondary.pop(0)
        where += f"; in {owner} on {event}"
        run.outcome.status = _status(run, error)
        from .early_end import note_newest

        note_newest(run, error)
    warn_of_closing(run)
    run.bus.blamed = None  # keeps no traceback, and so no batch, alive
    run.outcome.result = _result(run, error)
    if error is None:
        return
    error.add_note(f"heliograph: {where}")
    for owner, event, other in secondary:
        error.add_note(f"heliograph: then {owner} failed on {event}: {describe_error(other)}")
    if run.outcome.replacement is not None and run.outcome.replacement is not error:
        raise run.outcome.replacement from error
    if error is not passing:
        raise error


def _close_all(run: RunContext, error: BaseException | None, departure: Departure) -> Failures:
    """Close whatever was opened, even if some of it fails; return (owner, event, error), a Ctrl-C first.

    Raises:
        KeyboardInterrupt: the second one; the rest is not closed.
    """
    run.bus.interrupted = isinstance(error, KeyboardInterrupt)
    failures: Failures = []

    def add(owner: str, event: str, failure: BaseException) -> None:
        failures.append((owner, event, departure.fail(failure, f"{place_of(run)}; in {owner} on {event}")))

    try:
        for owner, event, failure in loop.end(run, error):
            add(owner, event, failure)
        for owner, failure in run.plugins.close():
            add(owner, "close", failure)
        for close in (departure.finish, run.hooks.closing.close):
            try:
                close()
            except BaseException as failure:  # joins the others
                if run.bus.is_second_interrupt(failure):
                    raise
                add("the run", "close", failure)
    except BaseException as interrupt:
        departure.fail(interrupt, place_of(run))
        raise
    finally:
        run.plugins.free()
    return sorted(failures + departure.failures, key=lambda each: not isinstance(each[2], KeyboardInterrupt))


def _status(run: RunContext, error: BaseException | None) -> Status:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if error is not None:
        return "failed"
    return "stopped" if run.control.stopped else "completed"


def _exit_status(run: RunContext) -> int:
    statuses = {"interrupted": 130, "failed": 1}  # what a shell calls an interrupt, and Python an exception
    return statuses.get(run.outcome.status, run.outcome.exit_status or 0)


def _where(run: RunContext, error: BaseException | None) -> str:
    where = place_of(run)
    owner, event = (None, None) if error is None else run.blame(error)
    return where if owner is None else f"{where}; in {owner} on {event}"


def _resume(run: RunContext) -> ResumeReport:
    guarantee, reasons = run.data.guarantee()
    report = ResumeReport(
        guarantee, reasons, fresh_plugins=run.resumption.fresh_plugins, unclaimed_states=run.resumption.unclaimed_states
    )
    at = run.resumed_at
    if at is None:
        return report
    report = replace(report, path=run.resumed_from, restored=tuple(run.resumption.restored))
    report = replace(report, verified_steps=run.verified_steps, difference=run.difference)
    return replace(report, epoch=at.epoch, batch=at.batch, step=at.steps)


def _result(run: RunContext, error: BaseException | None) -> RunResult:
    asked = run.control.stop_request
    return RunResult(
        status=run.outcome.status,
        reason=run.reason(error),
        stopped_by=asked.by if run.outcome.status == "stopped" and asked is not None else None,
        stopped_on_rank=asked.rank if run.outcome.status == "stopped" and asked is not None else None,
        progress=run.progress.copy(),
        metrics=dict(run.metrics),
        **({} if run.outcome.rows is None else run.outcome.rows.as_results(run)),
        best_checkpoint=run.best_checkpoint,
        last_checkpoint=run.last_checkpoint,
        recording=run.recording,
        history=run.control.history,
        seconds=perf_counter() - run.outcome.began,
        exit_status=_exit_status(run),
        resume=_resume(run) if run.settings.train else None,
        notes=tuple(run.notes),
        warnings=tuple(run.warnings),
        plugin_errors=run.plugins.errors(),
        plugin_seconds=dict(run.plugin_seconds),
        predictions=run.outcome.predictions,
    )


Failures = list[tuple[str, str, BaseException]]  # owner, event, error


class Departure:
    """How a run leaves its group.

    Args:
        run: the run.

    Attributes:
        failures: what failed while the group was left in haste.
    """

    def __init__(self, run: RunContext) -> None:
        self.failures: Failures = []
        self._run = run

    def fail(self, error: BaseException, where: str) -> BaseException:
        """Leave the group at once, for an error that not all ranks share; the others are informed before.

        Args:
            error: why.
            where: where in the run it came up.

        Returns:
            What caused the error: itself, or that another rank failed.
        """
        from .early_end import leave_group

        cause, failure = leave_group(self._run, error, where)
        if failure is not None:
            self.failures.append(("the run", "leaving the group", failure))
        return cause

    def finish(self) -> None:
        """End together with the others, if nothing failed: take the wrappers off, agree on exit status and warnings."""
        run = self._run
        if not run.outcome.has_left_group:
            if run.outcome.rows is not None and run.settings.train:
                run.outcome.rows.finish(run)
            run.engine.tear_down()
            run.control.agree_on_exit_status()
            if run.control.is_shared:
                own = tuple(run.warnings)
                for rank, others in enumerate(run.engine.gather_objects(own)):
                    for text in others:
                        run.warn(text if text in own else f"On rank {rank}: {text}")
