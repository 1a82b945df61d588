"""Find the parents of a forked training in its recording."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from ..format.records import AttemptRecord, Batches, EventEntry

PARENT, CHANGE = "forked_from", "fork_change"  # hyper-parameters of a fork
BETWEEN = " at step "  # in the value of PARENT, between the parent's recording and the step


@dataclass(frozen=True, slots=True)
class Parent:
    """The parent of a fork.

    Attributes:
        recording: the path of the parent's recording when the fork began; empty if unknown.
        step: the optimizer step after which the fork differs from it.
        training: the id of the parent's training, empty if it is not recorded.
        change: the function that changed the fork; empty without one, and for the parent of a parent.
    """

    recording: str
    step: int
    training: str = ""
    change: str = ""

    @property
    def name(self) -> str:  # without folder and suffix
        return PurePath(self.recording).stem

    @property
    def parting(self) -> str:
        return f"at step {self.step}" + f", changed by {self.change}" * bool(self.change)


def ancestors(first: AttemptRecord) -> list[Parent]:
    """Return the parent of a training, the parent's parent and so on; `first` is the first attempt of the training."""
    loads = (entry for entry in first.entries if isinstance(entry, EventEntry) and entry.event == "checkpoint_loaded")
    loaded = next(loads, None)
    parents = list(_chain(loaded.data.get("forked_from")) if loaded is not None else ()) or _from_start(first)
    change = first.hyper_parameters.get(CHANGE)
    if parents and isinstance(change, str):
        parents[0] = replace(parents[0], change=change.rpartition("<locals>.")[2])
    return parents


def parting_clock(first: AttemptRecord, step: int) -> float:
    """Return the seconds from the beginning of a fork's first attempt to a step; 0 if the fork began later."""
    clock = 0.0
    for entry in first.entries:
        if isinstance(entry, EventEntry):
            if entry.counters.steps > step:
                break
            clock = max(clock, entry.clock)
        elif isinstance(entry, Batches):
            if entry.first.steps >= step:
                break
            at = min(bisect_left(entry.steps, step), len(entry) - 1)
            clock = max(clock, entry.clock + (entry.centiseconds[at] - entry.centiseconds[-1]) / 100)
    return clock


def _chain(parent: Any) -> Iterator[Parent]:
    while isinstance(parent, Mapping):
        yield Parent(parent["recording"], parent["step"], parent["training"])
        parent = parent.get("forked_from")


def _from_start(first: AttemptRecord) -> list[Parent]:
    """Return the parent of a fork without a checkpoint, from a hyper-parameter."""
    parent = first.hyper_parameters.get(PARENT)
    recording, between, step = parent.rpartition(BETWEEN) if isinstance(parent, str) else ("", "", "")
    return [Parent(recording, int(step))] if between and step.isascii() and step.isdecimal() else []
