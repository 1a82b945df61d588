"""The facts of a recorded run as plain data, for `--json` and the command `status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

from ..format.records import Counters, Recording
from .attempt_summary import AttemptSummary, all_notes, all_warnings, main_attempt, run_name, summarize_attempts
from .requests import RequestOutcome, requests_of
from .saves import best_and_last, roles_of, saves_of

SCHEMA = "heliograph.run/1"


def facts_of(recording: Recording, *, is_running: bool | None = None) -> dict[str, Any]:
    """Return what a recording has about its run; docs/packages/explain.md documents the keys.

    Args:
        recording: the recording of the run.
        is_running: whether a process is writing it, None if unknown.
    """
    attempts = summarize_attempts(recording, is_running=is_running)
    main, saves = main_attempt(attempts), saves_of(attempts)
    best, last = best_and_last(attempts, saves)
    return {
        "schema": SCHEMA,
        "recording": str(recording.path),
        "run": run_name(attempts),
        "status": main.status,
        "reason": None if main.ending is None else main.ending.data["reason"],
        "by": None if main.ending is None else main.ending.data["by"],
        "began": _time(attempts[0], 0.0),
        "since": _time(main, main.seconds),
        "progress": _counters(main.last),
        "metrics": _metrics(attempts),
        "best_checkpoint": best,
        "last_checkpoint": last,
        "attempts": [_attempt(attempt) for attempt in attempts],
        "requests": [_request(outcome) for attempt in attempts for outcome in requests_of(attempt)],
        "checkpoints": [
            {
                "attempt": save.attempt,
                "epoch": save.counters.epoch,
                "step": save.counters.steps,
                "path": save.path,
                "is_best": save.is_best or "best" in role,
                "requested_by": sorted({request.by for request in save.requests}),
                "pruned": save.rule or None,
            }
            for save, role in zip(saves, roles_of(attempts, saves), strict=True)
        ],
        "warnings": all_warnings(attempts),
        "notes": all_notes(attempts),
    }


def describe_status(facts: Mapping[str, Any]) -> str:
    """Return the state of a run in a few lines."""
    at = facts["progress"]
    lines = [f"{facts['run']}: {facts['status']}" + (f", since {facts['since']}" if facts["since"] else "")]
    if facts["reason"]:
        lines.append(f"reason: {facts['reason']}" + (f" ({facts['by']})" if facts["by"] else ""))
    lines.append(
        f"at: epoch {at['epoch']}, batch {at['batch']}, step {at['step']:,}, {at['seconds']:,.1f} s of training"
    )
    if facts["metrics"]:
        lines.append("metrics: " + ", ".join(f"{name} {value:.5g}" for name, value in facts["metrics"].items()))
    lines.append(f"last checkpoint: {facts['last_checkpoint'] or 'none'}")
    return "\n".join(lines)


def _attempt(attempt: AttemptSummary) -> dict[str, Any]:
    restores = [
        {"path": restore.path, "step": restore.counters.steps, "is_roll_back": restore.is_roll_back}
        for restore in attempt.restores
    ]
    return {
        "number": attempt.number,
        "phase": attempt.attempt.phase,
        "began": _time(attempt, 0.0),
        "seconds": attempt.seconds,
        "status": attempt.status,
        "progress": _counters(attempt.last),
        "restores": restores,
    }


def _request(outcome: RequestOutcome) -> dict[str, Any]:
    served = None if outcome.is_unserved is None else not outcome.is_unserved
    taken_back = None if outcome.taken_back is None else outcome.taken_back.by
    return {"attempt": outcome.attempt, **asdict(outcome.request), "served": served, "taken_back_by": taken_back}


def _counters(counters: Counters) -> dict[str, Any]:
    values = asdict(counters)
    return {"step": values.pop("steps"), **values}


def _metrics(attempts: Sequence[AttemptSummary]) -> dict[str, float]:
    """Return the newest value of each metric."""
    metrics: dict[str, float] = {}
    for attempt in attempts:
        for entry in attempt.events("log", "validation_end", "test_end", "predict_end"):
            metrics |= entry.data["metrics"]
        if attempt.ending is not None:
            metrics |= attempt.ending.data["metrics"]
    return metrics


def _time(attempt: AttemptSummary, seconds: float) -> str | None:
    began: datetime | None = attempt.began
    if began is None:
        return None
    moment = (began + timedelta(seconds=seconds)).astimezone(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")  # as `fromdate` of jq reads it
