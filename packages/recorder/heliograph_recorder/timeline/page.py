"""A recorded run as a self-contained page: curves, requests, checkpoints, phases and the time of plugins."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from heliograph.events import CHANGES

from ..explain import words
from ..explain.attempt_summary import (
    AttemptSummary,
    Parent,
    Restore,
    all_notes,
    all_warnings,
    ancestors,
    main_attempt,
    parting_clock,
    run_name,
    summarize_attempts,
)
from ..explain.attempts import KINDS, describe_comparison, describe_ending, progress, reasons, who_changed
from ..explain.efficiency import costs, efficiency, longest, phases, timed_seconds, totals, untimed_attempts
from ..explain.judge import Measured
from ..explain.requests import ROUTINE, RequestOutcome, group_requests, positions, requests_of
from ..explain.saves import Save, common_folder, relative_name, roles_of, saves_of
from ..format.reader import damage_of, gc_paused
from ..format.records import Counters, Recording
from ..verbs import VERBS
from .curves import Axis, Curve, charts, pieces

SCRIPTS = ("drawing.js", "marks.js", "charts.js", "tables.js", "page.js")  # in the order of their dependencies
LIVE = ("comparison.js", "live.js")  # after SCRIPTS
LATEST = ("train/loss", "validation/loss")


def write_timeline(recording: Recording, path: str | Path) -> None:
    """Write the page of a recorded run.

    Args:
        recording: of the run.
        path: the file to overwrite; its folder is created if missing.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(page(recording), encoding="utf-8")


def page(recording: Recording) -> str:
    """Return the page, with its script and style; its policy forbids loading anything."""
    data = facts(recording)
    return _fill(f"{data['run']}: {data['ended']}", SCRIPTS, "", "", data)


def live_page(about: Mapping[str, Any], title: str) -> str:
    """Return the page of `watch`, which loads the facts from its server, and nothing from elsewhere."""
    return _fill(title, (*SCRIPTS, *LIVE), "connect-src 'self'; ", _part("live.html"), {"live": about})


def _fill(title: str, scripts: Sequence[str], policy: str, live: str, data: dict[str, Any]) -> str:
    style, script = _part("page.css"), "\n".join(_part(name) for name in scripts)
    policy = f"default-src 'none'; script-src '{_policy_hash(script)}'; style-src '{_policy_hash(style)}'; {policy}"
    parts = {
        "POLICY": f"{policy}base-uri 'none'; form-action 'none'",
        "TITLE": escape(title),
        "STYLE": style,
        "LIVE": live,
        "DATA": _embed(data),
        "SCRIPT": script,
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda placeholder: parts[placeholder[1]], _part("page.html"))


@gc_paused()
def facts(recording: Recording, *, is_running: bool | None = None) -> dict[str, Any]:
    """Return everything that the page shows, as plain data; `is_running` is None if unknown."""
    attempts = summarize_attempts(recording, is_running=is_running)
    axis = Axis(attempts)
    spent = efficiency(recording, attempts)
    requests = {attempt.number: requests_of(attempt) for attempt in attempts}
    slices = [piece for attempt in attempts for piece in phases(attempt)]
    return {
        "file": recording.path.name,
        **_header(main_attempt(attempts), attempts),
        "attempts": [_attempt(attempt, axis, attempts) for attempt in attempts],
        "gap": axis.gap,
        "end": axis.end,
        "charts": [
            {"name": name, "curves": [_curve(curve) for curve in curves]}
            for name, curves in charts(recording, attempts, axis).items()
        ],
        "marks": [list(mark) for mark in marks(attempts, requests, axis)],
        "returns": [restore for attempt in attempts for restore in _restores(attempt, axis)],
        "phases": [
            [piece.kind, piece.attempt, *(axis.at(piece.attempt, at) for at in (piece.begin, piece.end)), piece.step]
            for piece in longest(slices)
        ],
        "totals": list(totals(slices).items()),
        "wall": sum(attempt.seconds for attempt in attempts),
        "timed": timed_seconds(attempts),
        "untimed": untimed_attempts(attempts),
        "costs": [
            [cost.plugin, cost.event, cost.seconds, cost.emissions, cost.longest, cost.is_estimate]
            for cost in costs(attempts)
        ],
        "requests": [
            [group.what, group.times, group.requester, group.first.step, positions(group), group.reason, group.never]
            for group in group_requests(request for outcomes in requests.values() for request in outcomes)
        ],
        "goodput": spent.goodput if spent.parts and not spent.is_pending else None,
        "is_pending": spent.is_pending,
        "parts": list(spent.parts.items()),
        "findings": [[finding.kind, finding.text] for finding in spent.findings],
        "ranks": [] if spent.ranks is None else _ranks(spent.ranks),
        **_checkpoints(attempts),
    }


def _ranks(measured: Measured) -> list[tuple[float, ...]]:
    columns = measured.batch, measured.load, measured.forward, measured.memory, measured.device_memory
    return [(rank, *row) for rank, row in enumerate(zip(*columns, strict=True))]


def _header(main: AttemptSummary, attempts: list[AttemptSummary]) -> dict[str, Any]:
    closed, last = main.ending, main.last
    metrics = closed.data["metrics"] if closed is not None else {}
    parents = ancestors(attempts[0].attempt)
    return {
        "run": run_name(attempts),
        "parent": {"recording": parents[0].recording, "text": fork_text(parents[0])} if parents else None,
        "status": main.attempt.status or ("running" if main.is_running and main.is_last else "killed"),
        "ended": describe_ending(main),
        "why": reasons(main),
        "warnings": all_warnings(attempts),
        "facts": [
            ("position", words.position(last) if main.is_fit else progress(main)),
            ("samples", f"{last.samples:,}"),
            *([("tokens", f"{last.tokens:,}")] if last.tokens else []),
            ("training", words.seconds(last.seconds)),
            ("attempts", f"{sum(attempt.is_fit for attempt in attempts):,}"),
            ("started", attempts[0].began_text),
        ],
        "metrics": [[name, words.number(value)] for name, value in sorted(metrics.items())],
        "latest": [[name, words.number(value)] for name, value in _latest(attempts).items()],
        "notes": all_notes(attempts),
        "damage": damage_of(attempt.attempt for attempt in attempts),
    }


def _latest(attempts: Sequence[AttemptSummary]) -> dict[str, float]:
    losses: dict[str, float] = {}
    for attempt in attempts:
        for entry in attempt.events("log", "validation_end"):
            losses |= {name: value for name, value in entry.data["metrics"].items() if name in LATEST}
    return losses


def _attempt(attempt: AttemptSummary, axis: Axis, attempts: Sequence[AttemptSummary]) -> dict[str, Any]:
    gap = attempt.gap(attempts[attempt.number - 2]) if attempt.number > 1 else None
    return {
        "number": attempt.number,
        "kind": KINDS[attempt.attempt.phase],
        "began": attempt.began_text,
        "ended": describe_ending(attempt),
        "start": axis.at(attempt.number, 0.0),
        "seconds": attempt.seconds,
        "took": words.seconds(attempt.seconds),
        "came": progress(attempt),
        "lost": "; ".join(_lost(restore) for restore in attempt.restores if restore.lost_work() is not None),
        "step": attempt.last.steps if attempt.is_fit else 0,
        "gap": "" if gap is None else words.seconds(gap),
    }


def _lost(restore: Restore) -> str:
    lost = restore.lost_work() or Counters()
    verb = "rolled back" if restore.is_roll_back else "resumed"
    return f"{verb}: {words.count_things(lost.steps, 'step')}, {words.seconds(lost.seconds)}"


def _checkpoints(attempts: Sequence[AttemptSummary]) -> dict[str, Any]:
    saves = saves_of(attempts)
    folder = common_folder(save.path for save in saves)
    roles = roles_of(attempts, saves)
    rows = []
    for save, role in zip(saves, roles, strict=True):
        pruned = None if save.pruned_at is None else save.pruned_at.steps
        name = relative_name(save.path, folder)
        rows.append([save.counters.steps, save.counters.epoch, name, role, save.is_best, pruned, save.rule])
    return {"folder": folder, "checkpoints": rows}


def _restores(attempt: AttemptSummary, axis: Axis) -> list[dict[str, Any]]:
    rows = []
    for restore in attempt.restores:
        lost = restore.lost_work()
        rows.append(
            {
                "step": restore.counters.steps,
                "left": restore.before.steps if restore.before is not None else restore.counters.steps,
                "time": axis.at(attempt.number, restore.clock),
                "title": "rolled back" if restore.is_roll_back else f"attempt {attempt.number}: resumed",
                "lines": [
                    f"from {restore.path}" if restore.path is not None else "from a state without a file",
                    f"at {words.position(restore.counters)}",
                    "no work was lost"
                    if lost is None
                    else f"lost: {words.count_things(lost.steps, 'step')}, {words.count_things(lost.batch, 'batch')}, "
                    f"{words.seconds(lost.seconds)}",
                    *([] if restore.is_roll_back else describe_comparison(attempt)),
                ],
            }
        )
    return rows


def _curve(curve: Curve) -> dict[str, Any]:
    """Return a curve as columns; NaN and infinity become strings."""
    return {
        "metric": curve.metric,
        "split": curve.split,
        "total": curve.total,
        "pieces": [
            {
                "attempt": piece[0].attempt,
                "lost": piece[0].is_lost,
                "x": [point.step for point in piece],
                "t": [point.time for point in piece],
                "y": [_json_number(point.value) for point in piece],
            }
            for piece in pieces(curve.points)
        ],
    }


def _json_number(value: float) -> float | str:
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)


def _embed(data: dict[str, Any]) -> str:
    """Return data as JSON that is safe inside a script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy_hash(text: str) -> str:
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


class Mark(NamedTuple):
    """One mark on the curves.

    Attributes:
        kind: `best`, `last`, `kept` or `pruned` for a checkpoint, `decision`, `stop`, `plugin`, `verdict` or `fork`.
        step: optimizer steps.
        time: in seconds on the time axis.
        title: the heading.
        lines: details: who and why.
    """

    kind: str
    step: int
    time: float
    title: str
    lines: tuple[str, ...]


def marks(
    attempts: Sequence[AttemptSummary], requests: Mapping[int, Sequence[RequestOutcome]], axis: Axis
) -> list[Mark]:
    """Return all marks by time; `requests` is by the number of the attempt."""
    saves = saves_of(attempts)
    all_marks = [_checkpoint(save, axis, role) for save, role in zip(saves, roles_of(attempts, saves), strict=True)]
    all_marks += _parting(attempts[0], axis)
    for attempt in attempts:
        if attempt.is_fit:
            all_marks += [*_decisions(attempt, requests[attempt.number], axis), *_plugins(attempt, axis)]
            all_marks += _verdicts(attempt, axis)
    return sorted(all_marks, key=lambda mark: mark.time)


def _checkpoint(save: Save, axis: Axis, role: str) -> Mark:
    kind = "pruned" if save.pruned_at is not None else role.partition(" ")[0] or "kept"
    lines = [Path(save.path).name, f"epoch {save.counters.epoch}, batch {save.counters.batch}"]
    lines += [f"requested by {request.by}: {request.reason}" for request in save.requests]
    lines += ["the best when it was written"] if save.is_best else []
    if save.pruned_at is not None:
        lines.append(f"pruned at step {save.pruned_at.steps}: {save.rule}")
    title = f"{role} checkpoint".lstrip() + ", pruned" * (kind == "pruned")
    return Mark(
        kind,
        save.counters.steps,
        axis.at(save.attempt, save.clock),
        f"{title}, step {save.counters.steps}",
        tuple(lines),
    )


def _parting(first: AttemptSummary, axis: Axis) -> Iterator[Mark]:
    for parent in ancestors(first.attempt)[:1]:
        time = axis.at(first.number, parting_clock(first.attempt, parent.step))
        yield Mark("fork", parent.step, time, fork_text(parent), (parent.recording,))


def fork_text(parent: Parent) -> str:
    return f"fork of {parent.name} {parent.parting}"


def _decisions(attempt: AttemptSummary, requests: Sequence[RequestOutcome], axis: Axis) -> Iterator[Mark]:
    for outcome in requests:
        request = outcome.request
        if request.verb in ROUTINE:
            continue
        rank = "" if request.rank is None else f" on rank {request.rank}"
        during = f" during {request.event}" if request.event else ""
        lines = [request.what] if request.verb in CHANGES else []
        lines += [f"by {request.by}{rank}{during}: {request.reason}", f"epoch {request.epoch}, batch {request.batch}"]
        lines += [f"made {words.times(request.times)}"] if request.times > 1 else []
        lines += ["never served"] if outcome.is_unserved else []
        kind = "stop" if request.verb == "stop" else "decision"
        title = f"{VERBS[request.verb].mark}, step {request.step}"
        yield Mark(kind, request.step, axis.at(attempt.number, outcome.clock), title, tuple(lines))


def _plugins(attempt: AttemptSummary, axis: Axis) -> Iterator[Mark]:
    for entry in attempt.events("plugin_changed", "plugin_failed"):
        data = entry.data
        if entry.event == "plugin_changed":
            title, line = f"{data['plugin']} was {data['change']}", who_changed(data)
        else:
            title, line = f"{data['plugin']} failed on {data['event']}", str(data["error"])
        yield Mark("plugin", entry.counters.steps, axis.at(attempt.number, entry.clock), title, (line,))


def _verdicts(attempt: AttemptSummary, axis: Axis) -> Iterator[Mark]:
    for entry in attempt.events("verdict"):
        data = entry.data
        title = f"{data['kind']}" if data["holds"] else f"{data['kind']} no longer"
        at = entry.counters.steps
        yield Mark("verdict", at, axis.at(attempt.number, entry.clock), f"{title}, step {at}", (str(data["text"]),))
