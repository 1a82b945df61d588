"""A recorded run as one self-contained page: curves, decisions, checkpoints, phases and the plugins' time."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..explain import words
from ..explain.attempt_summary import (
    AttemptSummary,
    Restore,
    all_notes,
    all_warnings,
    main_attempt,
    run_name,
    summarize_attempts,
)
from ..explain.attempts import KINDS, describe_comparison, describe_ending, progress, reasons
from ..explain.costs import costs, timed_seconds, untimed_attempts
from ..explain.efficiency import efficiency, longest, phases, totals
from ..explain.judge import Measured
from ..explain.lineage import ancestors
from ..explain.requests import group_requests, positions, requests_of
from ..explain.saves import common_folder, relative_name, roles_of, saves_of
from ..format.reader import damage_of, gc_paused
from ..format.records import Counters, Recording
from .axis import Axis
from .curves import Curve, charts, pieces
from .marks import fork_text, marks

SCRIPTS = ("drawing.js", "marks.js", "charts.js", "tables.js", "page.js")  # each uses those before it
LIVE = ("comparison.js", "live.js")  # after them
LATEST = ("train/loss", "validation/loss")


def write_timeline(recording: Recording, path: str | Path) -> None:
    """Write the page.

    Args:
        recording: of the run.
        path: the file, which is overwritten; its folder is created if it is missing.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(page(recording), encoding="utf-8")


def page(recording: Recording) -> str:
    """Return the page. It contains its script and style, and its policy forbids loading anything."""
    found = facts(recording)
    return _fill(f"{found['run']}: {found['ended']}", SCRIPTS, "", "", found)


def live_page(about: Mapping[str, Any], title: str) -> str:
    """Return the page of `watch`, which asks its server for the facts, and may load nothing from elsewhere.

    Args:
        about: what its script is given.
        title: of the page until it shows the runs.
    """
    return _fill(title, (*SCRIPTS, *LIVE), "connect-src 'self'; ", _part("live.html"), {"live": about})


def _fill(title: str, scripts: Sequence[str], policy: str, live: str, data: dict[str, Any]) -> str:
    """Return the page with its parts.

    Args:
        title: of the page, as a browser shows it.
        scripts: the names of their files.
        policy: what it may load.
        live: the sections that only `watch` has.
        data: what its script is given.
    """
    style, script = _part("page.css"), "\n".join(_part(name) for name in scripts)
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; {policy}"
    parts = {
        "POLICY": f"{policy}base-uri 'none'; form-action 'none'",
        "TITLE": escape(title),
        "STYLE": style,
        "LIVE": live,
        "DATA": _embed(data),  # recorded texts may look like a placeholder: those after it are looked for in the rest
        "SCRIPT": script,
    }
    done, text = "", _part("page.html")
    for name, part in parts.items():
        head, placeholder, text = text.partition("{{" + name + "}}")
        assert placeholder, name
        done += head + part
    return done + text


@gc_paused()
def facts(recording: Recording, *, is_running: bool | None = None) -> dict[str, Any]:
    """Return everything that the page shows, as plain data.

    Args:
        recording: of the run.
        is_running: whether a process is writing it, None where that is not known.
    """
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
            {"name": name, "curves": [_curve(each) for each in curves]}
            for name, curves in charts(recording, attempts, axis).items()
        ],
        "marks": [
            [each.kind, each.step, each.time, each.title, each.lines] for each in marks(attempts, requests, axis)
        ],
        "returns": [each for attempt in attempts for each in _restores(attempt, axis)],
        "phases": [
            [each.kind, each.attempt, axis.at(each.attempt, each.begin), axis.at(each.attempt, each.end), each.step]
            for each in longest(slices)
        ],
        "totals": list(totals(slices).items()),
        "wall": sum(attempt.seconds for attempt in attempts),
        "timed": timed_seconds(attempts),
        "untimed": untimed_attempts(attempts),
        "costs": [
            [each.plugin, each.event, each.seconds, each.emissions, each.longest, each.is_estimate]
            for each in costs(attempts)
        ],
        "requests": [
            [each.what, each.times, each.requester, each.first.step, positions(each), each.reason, each.never]
            for each in group_requests(request for of_attempt in requests.values() for request in of_attempt)
        ],
        "goodput": spent.goodput if spent.parts and not spent.is_pending else None,
        "is_pending": spent.is_pending,
        "parts": list(spent.parts.items()),
        "findings": [[each.kind, each.text] for each in spent.findings],
        "ranks": [] if spent.ranks is None else _ranks(spent.ranks),
        **_checkpoints(attempts),
    }


def _ranks(measured: Measured) -> list[tuple[float, ...]]:
    """Return a row for each rank: seconds of a batch, of its wait for data and its forward pass, bytes of memory."""
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
        "damage": damage_of(each.attempt for each in attempts),
    }


def _latest(attempts: Sequence[AttemptSummary]) -> dict[str, float]:
    """Return the loss of the training and of the validation, as they were last measured."""
    found: dict[str, float] = {}
    for attempt in attempts:
        for entry in attempt.events("log", "validation_end"):
            found |= {name: value for name, value in entry.data["metrics"].items() if name in LATEST}
    return found


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
        "lost": "; ".join(_lost(each) for each in attempt.restores if each.lost_work() is not None),
        "step": attempt.last.steps if attempt.is_fit else 0,
        "gap": "" if gap is None else words.seconds(gap),
    }


def _lost(restore: Restore) -> str:
    lost = restore.lost_work() or Counters()
    how = "rolled back" if restore.is_roll_back else "resumed"
    return f"{how}: {words.count_things(lost.steps, 'step')}, {words.seconds(lost.seconds)}"


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
    for each in attempt.restores:
        lost = each.lost_work()
        rows.append(
            {
                "step": each.counters.steps,
                "left": each.before.steps if each.before is not None else each.counters.steps,
                "time": axis.at(attempt.number, each.clock),
                "title": "rolled back" if each.is_roll_back else f"attempt {attempt.number}: resumed",
                "lines": [
                    f"from {each.path}" if each.path is not None else "from a state without a file",
                    f"at {words.position(each.counters)}",
                    "no work was lost"
                    if lost is None
                    else f"lost: {words.count_things(lost.steps, 'step')}, {words.count_things(lost.batch, 'batch')}, "
                    f"{words.seconds(lost.seconds)}",
                    *([] if each.is_roll_back else describe_comparison(attempt)),
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


def _digest(text: str) -> str:
    """Return the hash of an inline script or style for a content security policy."""
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
