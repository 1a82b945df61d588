"""A recorded run as a trace that Perfetto and Chrome's `about:tracing` show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..explain.attempt_summary import Leg, legs, run_name
from ..explain.attempts import KINDS
from ..explain.requests import asks_of
from ..explain.verdict import circumstances, counters, ended
from ..format.records import Recording, TimesEntry
from .phases import phases

PROCESS, PHASES, EPOCHS, DECISIONS, CHECKPOINTS = 1, 1, 2, 3, 4
TRACKS = {PHASES: "attempts and phases", EPOCHS: "epochs", DECISIONS: "control", CHECKPOINTS: "checkpoints"}
OF_CHECKPOINTS = ("checkpoint_saved", "checkpoint_pruned", "checkpoint_loaded", "resume_verified")
Trace = dict[str, Any]


def write_trace(recording: Recording, path: str | Path) -> None:
    """Write the trace: attempts, epochs and phases are slices, requests and checkpoints instants, metrics counters.

    Args:
        recording: of the run.
        path: the file; one that is there is replaced, a folder that is not is made.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(trace(recording), allow_nan=False), encoding="utf-8")


def trace(recording: Recording) -> Trace:
    """Return the trace as plain data, in the format of Chrome's trace events."""
    found = legs(recording)
    named = [_about("process_name", run_name(found), 0)]
    named += [_about("thread_name", name, track) for track, name in TRACKS.items()]
    events = [event for leg, start in zip(found, _starts(found), strict=True) for event in _events(leg, start)]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {"traceEvents": named + events, "displayTimeUnit": "ms", "otherData": {"recording": recording.path.name}}


def _starts(found: Sequence[Leg]) -> list[float]:
    """Return when each attempt began, in seconds behind the first, as it was by the clock on the wall."""
    starts = [0.0]
    for before, leg in pairwise(found):
        starts.append(starts[-1] + before.seconds + (leg.gap(before) or 0.0))
    return starts


def _events(leg: Leg, start: float) -> Iterator[Trace]:
    name = f"{KINDS[leg.attempt.phase]}, attempt {leg.number}"
    yield _slice(name, start, start + leg.seconds, PHASES, _attempt(leg))
    yield from _epochs(leg, start)
    for piece in phases(leg):
        yield _slice(piece.kind, start + piece.begin, start + piece.end, PHASES, {"step": piece.step})
    for ask in asks_of(leg):
        request = ask.request
        said = {"by": request.by, "reason": request.reason, "step": request.step, "during": request.event}
        yield _instant(request.verb, start + ask.clock, DECISIONS, {**said, "times": request.times})
    for entry in leg.happenings(*OF_CHECKPOINTS):
        yield _instant(entry.event, start + entry.clock, CHECKPOINTS, _finite(entry.data))
    for entry in leg.happenings("log", "validation_end", "test_end"):
        for name, value in entry.data["metrics"].items():
            if math.isfinite(value):  # of another, a counter could not tell
                yield _event("C", name, start + entry.clock, 0, args={"value": value})


def _epochs(leg: Leg, start: float) -> Iterator[Trace]:
    begun: tuple[int, float] | None = None
    for entry in leg.happenings("epoch_start", "epoch_end", "checkpoint_loaded"):
        if begun is not None:
            yield _slice(f"epoch {begun[0]}", start + begun[1], start + entry.clock, EPOCHS, {})
        begun = (entry.data["epoch"], entry.clock) if entry.event == "epoch_start" else None
    if begun is not None:
        yield _slice(f"epoch {begun[0]}", start + begun[1], start + leg.seconds, EPOCHS, {})


def _attempt(leg: Leg) -> Trace:
    spent = [entry for entry in leg.attempt.entries if isinstance(entry, TimesEntry)]
    handlers: dict[str, dict[str, float]] = {}
    for row in spent[-1].rows if spent else ():
        own = handlers.setdefault(row.plugin, {})
        own[row.event] = round(own.get(row.event, 0.0) + row.estimate, 6)
    return {"ended": ended(leg), "why": circumstances(leg), "came": counters(leg), "seconds in handlers": handlers}


def _slice(name: str, begin: float, end: float, track: int, args: Trace) -> Trace:
    return _event("X", name, begin, track, dur=_micros(end) - _micros(begin), args=args)


def _instant(name: str, moment: float, track: int, args: Trace) -> Trace:
    return _event("i", name, moment, track, s="t", args=args)


def _event(kind: str, name: str, moment: float, track: int, **more: Any) -> Trace:
    return {"ph": kind, "name": name, "ts": _micros(moment), "pid": PROCESS, "tid": track, **more}


def _micros(moment: float) -> int:
    """Return a moment in microseconds, in whole ones: slices that touch do not overlap by a rounding."""
    return round(moment * 1e6)


def _about(kind: str, name: str, track: int) -> Trace:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": track, "args": {"name": name}}


def _finite(data: Any) -> Any:
    """Return plain data without numbers that JSON does not know."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    return [_finite(each) for each in data] if isinstance(data, list | tuple) else data
