"""A recorded run as one page that needs nothing else: curves, decisions, checkpoints, phases and the plugins' time."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..explain import words
from ..explain.attempt_summary import Leg, legs, main_leg, run_name
from ..explain.attempts import KINDS, compared
from ..explain.control import when
from ..explain.costs import costs, timed_seconds, untimed
from ..explain.requests import asks_of, groups
from ..explain.saves import Save, common_folder, saves_of, within
from ..explain.verdict import circumstances, counters, ended
from ..format.damage import damage_in_short
from ..format.records import Recording
from .axis import Axis
from .curves import Curve, charts, pieces
from .marks import marks
from .phases import phases, thinned, totals

SCRIPTS = ("drawing.js", "marks.js", "charts.js", "tables.js", "page.js")  # each builds upon those before


def write_timeline(recording: Recording, path: str | Path) -> None:
    """Write the page.

    Args:
        recording: of the run.
        path: the file; one that is there is replaced, a folder that is not is made.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(page(recording), encoding="utf-8")


def page(recording: Recording) -> str:
    """Return the page, whose only script and style are within it, and which may load nothing."""
    style, script = _part("page.css"), "\n".join(_part(name) for name in SCRIPTS)
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    holes = {
        "POLICY": f"{policy}; base-uri 'none'; form-action 'none'",
        "STYLE": style,
        "SCRIPT": script,
        "DATA": _embedded(facts(recording)),  # last: what others wrote may look like a hole
    }
    text = _part("page.html")
    for name, filling in holes.items():
        head, hole, tail = text.partition("{{" + name + "}}")
        assert hole, name
        text = head + filling + tail
    return text


def facts(recording: Recording) -> dict[str, Any]:
    """Return everything that the page shows, as plain data."""
    found = legs(recording)
    axis = Axis(found)
    slices = [piece for leg in found for piece in phases(leg)]
    return {
        "file": recording.path.name,
        **_header(main_leg(found), found),
        "attempts": [_attempt(leg, axis, found) for leg in found],
        "gap": axis.gap,
        "end": axis.end,
        "charts": [
            {"name": name, "curves": [_curve(each) for each in curves]}
            for name, curves in charts(recording, found, axis).items()
        ],
        "marks": [[each.kind, each.step, each.time, each.title, each.lines] for each in marks(found, axis)],
        "returns": [each for leg in found for each in _returns(leg, axis)],
        "phases": [
            [each.kind, each.leg, axis.at(each.leg, each.begin), axis.at(each.leg, each.end), each.step]
            for each in thinned(slices)
        ],
        "totals": list(totals(slices).items()),
        "wall": sum(leg.seconds for leg in found),
        "timed": timed_seconds(found),
        "untimed": untimed(found),
        "costs": [
            [each.plugin, each.event, each.seconds, each.emissions, each.longest, each.is_estimate]
            for each in costs(found)
        ],
        "requests": [
            [each.first.verb, each.times, each.who, each.first.step, when(each), each.reason, each.never]
            for each in groups(ask for leg in found for ask in asks_of(leg))
        ],
        **_checkpoints(saves_of(found)),
    }


def _header(last: Leg, found: list[Leg]) -> dict[str, Any]:
    fits = [leg for leg in found if leg.is_fit]
    told = [
        ("where", words.place(last.last) if last.is_fit else counters(last)),
        ("samples", f"{last.last.samples:,}"),
        ("training", words.seconds(last.last.seconds)),
        ("attempts", f"{len(fits):,}"),
        ("begun", found[0].begun),
    ]
    closed = last.ending
    metrics = closed.data["metrics"] if closed is not None else {}
    said = [note for leg in found if leg.ending is not None for note in leg.ending.data["notes"]]
    return {
        "run": run_name(found),
        "status": last.attempt.status or "killed",
        "verdict": ended(last),
        "why": circumstances(last),
        "told": told,
        "metrics": [[name, words.number(value)] for name, value in sorted(metrics.items())],
        "notes": said,
        "damage": [f"attempt {leg.number}: {each}" for leg in found for each in damage_in_short(leg.attempt)],
    }


def _attempt(leg: Leg, axis: Axis, found: Sequence[Leg]) -> dict[str, Any]:
    gap = leg.gap(found[leg.number - 2]) if leg.number > 1 else None
    return {
        "number": leg.number,
        "kind": KINDS[leg.attempt.phase],
        "began": leg.begun,
        "ended": ended(leg),
        "start": axis.at(leg.number, 0.0),
        "seconds": leg.seconds,
        "took": words.seconds(leg.seconds),
        "came": counters(leg),
        "step": leg.last.steps if leg.is_fit else 0,
        "gap": "" if gap is None else words.seconds(gap),
    }


def _checkpoints(saves: Sequence[Save]) -> dict[str, Any]:
    folder = common_folder(save.path for save in saves)
    rows = []
    for save in saves:
        pruned = None if save.pruned is None else save.pruned.steps
        name = within(save.path, folder)
        rows.append([save.counters.steps, save.counters.epoch, name, save.is_best, pruned, save.rule])
    return {"folder": folder, "checkpoints": rows}


def _returns(leg: Leg, axis: Axis) -> list[dict[str, Any]]:
    told = []
    for each in leg.returns:
        again = each.again()
        told.append(
            {
                "step": each.counters.steps,
                "left": each.left.steps if each.left is not None else each.counters.steps,
                "time": axis.at(leg.number, each.clock),
                "title": "rolled back" if each.is_roll_back else f"attempt {leg.number}: resumed",
                "lines": [
                    f"from {each.path}" if each.path is not None else "from a state without a file",
                    f"at {words.place(each.counters)}",
                    "no work was lost"
                    if again is None
                    else f"lost: {words.counted(again.steps, 'step')}, {words.counted(again.batch, 'batch')}, "
                    f"{words.seconds(again.seconds)}",
                    *([] if each.is_roll_back else compared(leg)),
                ],
            }
        )
    return told


def _curve(curve: Curve) -> dict[str, Any]:
    """Return a curve as columns; a value that is no finite number is told as a word."""
    return {
        "metric": curve.metric,
        "split": curve.split,
        "total": curve.total,
        "pieces": [
            {
                "leg": piece[0].leg,
                "lost": piece[0].is_lost,
                "x": [point.step for point in piece],
                "t": [point.time for point in piece],
                "y": [_plain(point.value) for point in piece],
            }
            for piece in pieces(curve.points)
        ],
    }


def _plain(value: float) -> float | str:
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)


def _embedded(data: dict[str, Any]) -> str:
    """Return data as JSON that can end no script and begin no tag."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(text: str) -> str:
    """Return what a content security policy knows an inline script or style by."""
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
