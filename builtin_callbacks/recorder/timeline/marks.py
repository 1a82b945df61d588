"""What is marked on the curves of a recorded run: checkpoints, decisions, changes of plugins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..explain import words
from ..explain.attempt_summary import Leg
from ..explain.requests import ROUTINE, asks_of
from ..explain.saves import Save, best_and_last, saves_of
from .axis import Axis

VERBS = {
    "stop": "stop",
    "veto_stop": "stop put off",
    "end_epoch": "end of the epoch",
    "skip_batch": "batch left out",
    "skip_step": "step dropped",
    "next_phase": "next phase",
    "cut_validation": "validation cut short",
    "roll_back": "roll-back",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """One sign on the curves.

    Attributes:
        kind: `best`, `kept` or `pruned` for a checkpoint, `decision`, `stop` or `plugin`.
        step: optimizer steps behind it.
        time: its place on the time axis.
        title: what it is.
        lines: who and why.
    """

    kind: str
    step: int
    time: float
    title: str
    lines: tuple[str, ...]


def marks(found: Sequence[Leg], axis: Axis) -> list[Mark]:
    """Return everything that is marked, in the order in which it came about."""
    saves = saves_of(found)
    best, _ = best_and_last(found, saves)
    drawn = [_checkpoint(save, axis, is_best=save.path == best) for save in saves]
    for leg in found:
        if leg.is_fit:
            drawn += [*_decisions(leg, axis), *_plugins(leg, axis)]
    return sorted(drawn, key=lambda mark: mark.time)


def _checkpoint(save: Save, axis: Axis, *, is_best: bool) -> Mark:
    kind = "pruned" if save.pruned is not None else "best" if is_best else "kept"
    said = [Path(save.path).name, f"epoch {save.counters.epoch}, batch {save.counters.batch}"]
    said += [f"asked for by {request.by}: {request.reason}" for request in save.asked]
    said += ["the best when it was written"] if save.is_best else []
    if save.pruned is not None:
        said.append(f"pruned at step {save.pruned.steps}: {save.rule}")
    title = {"best": "best checkpoint", "kept": "checkpoint", "pruned": "checkpoint, pruned since"}[kind]
    return Mark(
        kind, save.counters.steps, axis.at(save.leg, save.clock), f"{title}, step {save.counters.steps}", tuple(said)
    )


def _decisions(leg: Leg, axis: Axis) -> Iterator[Mark]:
    for ask in asks_of(leg):
        request = ask.request
        if request.verb in ROUTINE:
            continue
        rank = "" if request.rank is None else f" on rank {request.rank}"
        during = f" during {request.event}" if request.event else ""
        said = [f"by {request.by}{rank}{during}: {request.reason}", f"epoch {request.epoch}, batch {request.batch}"]
        said += [f"made {words.times(request.times)}"] if request.times > 1 else []
        said += ["never served"] if ask.is_open else []
        kind = "stop" if request.verb == "stop" else "decision"
        title = f"{VERBS[request.verb]}, step {request.step}"
        yield Mark(kind, request.step, axis.at(leg.number, ask.clock), title, tuple(said))


def _plugins(leg: Leg, axis: Axis) -> Iterator[Mark]:
    for entry in leg.happenings("plugin_changed", "plugin_failed"):
        data = entry.data
        if entry.event == "plugin_changed":
            title, said = f"{data['plugin']} was {data['change']}", f"by {data['by']}"
        else:
            title, said = f"{data['plugin']} failed on {data['event']}", str(data["error"])
        yield Mark("plugin", entry.counters.steps, axis.at(leg.number, entry.clock), title, (said,))
