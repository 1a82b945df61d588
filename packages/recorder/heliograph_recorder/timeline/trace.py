"""A recorded run as a trace for Perfetto and Chrome's `about:tracing`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..explain.attempt_summary import AttemptSummary, run_name, summarize_attempts
from ..explain.attempts import KINDS, describe_ending, progress, reasons
from ..explain.efficiency import phases
from ..explain.requests import requests_of
from ..format.records import Recording, TimesEntry

PROCESS, PHASES, EPOCHS, DECISIONS, CHECKPOINTS = 1, 1, 2, 3, 4
TRACKS = {PHASES: "attempts and phases", EPOCHS: "epochs", DECISIONS: "control", CHECKPOINTS: "checkpoints"}
CHECKPOINT_EVENTS = ("checkpoint_saved", "checkpoint_pruned", "checkpoint_loaded", "resume_verified")
Trace = dict[str, Any]


def write_trace(recording: Recording, path: str | Path) -> None:
    """Write the trace for Perfetto.

    Args:
        recording: of the run.
        path: the file to overwrite; its folder is created if missing.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(trace(recording), allow_nan=False), encoding="utf-8")


def trace(recording: Recording) -> Trace:
    """Return the trace as plain data, in the format of Chrome's trace events."""
    attempts = summarize_attempts(recording)
    names = [_name("process_name", run_name(attempts), 0)]
    names += [_name("thread_name", name, track) for track, name in TRACKS.items()]
    starts = _starts(attempts)
    events = [event for attempt, start in zip(attempts, starts, strict=True) for event in _events(attempt, start)]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": {"recording": recording.path.name}}


def _starts(attempts: Sequence[AttemptSummary]) -> list[float]:
    """Return the wall-clock time of each attempt's begin, in seconds since the first attempt."""
    starts = [0.0]
    for previous, attempt in pairwise(attempts):
        starts.append(starts[-1] + previous.seconds + (attempt.gap(previous) or 0.0))
    return starts


def _events(attempt: AttemptSummary, start: float) -> Iterator[Trace]:
    name = f"{KINDS[attempt.attempt.phase]}, attempt {attempt.number}"
    yield _slice(name, start, start + attempt.seconds, PHASES, _attempt(attempt))
    yield from _epochs(attempt, start)
    for piece in phases(attempt):
        yield _slice(piece.kind, start + piece.begin, start + piece.end, PHASES, {"step": piece.step})
    for outcome in requests_of(attempt):
        request = outcome.request
        args: Trace = {"what": request.what, "by": request.by, "reason": request.reason, "step": request.step}
        args |= {"during": request.event, "times": request.times}
        yield _instant(request.verb, start + outcome.clock, DECISIONS, args)
    for entry in attempt.events(*CHECKPOINT_EVENTS):
        yield _instant(entry.event, start + entry.clock, CHECKPOINTS, _finite(entry.data))
    for entry in attempt.events("log", "validation_end", "test_end", "predict_end"):
        for name, value in entry.data["metrics"].items():
            if math.isfinite(value):  # a counter cannot show NaN or infinity
                yield _event("C", name, start + entry.clock, 0, args={"value": value})


def _epochs(attempt: AttemptSummary, start: float) -> Iterator[Trace]:
    begun: tuple[int, float] | None = None
    for entry in attempt.events("epoch_start", "epoch_end", "checkpoint_loaded"):
        if begun is not None:
            yield _slice(f"epoch {begun[0]}", start + begun[1], start + entry.clock, EPOCHS, {})
        begun = (entry.data["epoch"], entry.clock) if entry.event == "epoch_start" else None
    if begun is not None:
        yield _slice(f"epoch {begun[0]}", start + begun[1], start + attempt.seconds, EPOCHS, {})


def _attempt(attempt: AttemptSummary) -> Trace:
    times = [entry for entry in attempt.attempt.entries if isinstance(entry, TimesEntry)]
    handlers: dict[str, dict[str, float]] = {}
    for row in times[-1].rows if times else ():
        seconds = handlers.setdefault(row.plugin, {})
        seconds[row.event] = round(seconds.get(row.event, 0.0) + row.estimate, 6)
    return {
        "ended": describe_ending(attempt),
        "why": reasons(attempt),
        "came": progress(attempt),
        "seconds in handlers": handlers,
    }


def _slice(name: str, begin: float, end: float, track: int, args: Trace) -> Trace:
    return _event("X", name, begin, track, dur=_micros(end) - _micros(begin), args=args)


def _instant(name: str, moment: float, track: int, args: Trace) -> Trace:
    return _event("i", name, moment, track, s="t", args=args)


def _event(kind: str, name: str, moment: float, track: int, **more: Any) -> Trace:
    return {"ph": kind, "name": name, "ts": _micros(moment), "pid": PROCESS, "tid": track, **more}


def _micros(moment: float) -> int:
    """Return whole microseconds: rounding both ends of slices separately would make them overlap."""
    return round(moment * 1e6)


def _name(kind: str, name: str, track: int) -> Trace:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": track, "args": {"name": name}}


def _finite(data: Any) -> Any:
    """Return plain data with NaN and infinity as strings, because JSON has neither."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data
