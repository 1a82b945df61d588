"""The marks on the curves of a recorded run: checkpoints, decisions, changes of plugins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heliograph.events import CHANGES

from ..explain import words
from ..explain.attempt_summary import AttemptSummary
from ..explain.attempts import who_changed
from ..explain.lineage import Parent, ancestors, parting_clock
from ..explain.requests import ROUTINE, RequestOutcome
from ..explain.saves import Save, roles_of, saves_of
from ..verbs import VERBS
from .axis import Axis


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark on the curves.

    Attributes:
        kind: `best`, `last`, `kept` or `pruned` for a checkpoint, `decision`, `stop`, `plugin`, `verdict` or `fork`.
        step: optimizer steps done.
        time: in seconds on the time axis.
        title: what it is.
        lines: who and why.
    """

    kind: str
    step: int
    time: float
    title: str
    lines: tuple[str, ...]


def marks(
    attempts: Sequence[AttemptSummary], requests: Mapping[int, Sequence[RequestOutcome]], axis: Axis
) -> list[Mark]:
    """Return all marks, by time.

    Args:
        attempts: of the recording.
        requests: all of them, by the number of their attempt.
        axis: of the page.
    """
    saves = saves_of(attempts)
    found = [_checkpoint(save, axis, role) for save, role in zip(saves, roles_of(attempts, saves), strict=True)]
    found += _parting(attempts[0], axis)
    for attempt in attempts:
        if attempt.is_fit:
            found += [*_decisions(attempt, requests[attempt.number], axis), *_plugins(attempt, axis)]
            found += _verdicts(attempt, axis)
    return sorted(found, key=lambda mark: mark.time)


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
    """Yield where a fork parts from its parent."""
    for parent in ancestors(first.attempt)[:1]:
        time = axis.at(first.number, parting_clock(first.attempt, parent.step))
        yield Mark("fork", parent.step, time, fork_text(parent), (parent.recording,))


def fork_text(parent: Parent) -> str:
    """Return what a run is a fork of."""
    return f"fork of {parent.name} {parent.parting}"


def _decisions(attempt: AttemptSummary, requests: Sequence[RequestOutcome], axis: Axis) -> Iterator[Mark]:
    for each in requests:
        request = each.request
        if request.verb in ROUTINE:
            continue
        rank = "" if request.rank is None else f" on rank {request.rank}"
        during = f" during {request.event}" if request.event else ""
        lines = [request.what] if request.verb in CHANGES else []
        lines += [f"by {request.by}{rank}{during}: {request.reason}", f"epoch {request.epoch}, batch {request.batch}"]
        lines += [f"made {words.times(request.times)}"] if request.times > 1 else []
        lines += ["never served"] if each.is_unserved else [each.effect] if each.effect else []
        kind = "stop" if request.verb == "stop" else "decision"
        title = f"{VERBS[request.verb].mark}, step {request.step}"
        yield Mark(kind, request.step, axis.at(attempt.number, each.clock), title, tuple(lines))


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
