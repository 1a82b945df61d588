"""Of which training a recorded one is a fork, and where it parts from it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from ..format.forms import is_count, is_text
from ..format.records import AttemptRecord, Batches, EventEntry

PARENT, CHANGE = "forked_from", "fork_change"  # hyper-parameters of a fork
BETWEEN = " at step "  # in the first of them, after the recording of the parent


@dataclass(frozen=True, slots=True)
class Parent:
    """The training that another one is a fork of.

    Attributes:
        recording: the path of its recording when the fork began; that of its parent may be unknown, and empty.
        step: the optimizer steps after which the fork parts from it.
        training: its id, empty where that is not recorded.
        change: the function that changed the fork there; empty if nothing did, or for the parent of a parent.
    """

    recording: str
    step: int
    training: str = ""
    change: str = ""

    @property
    def name(self) -> str:
        return PurePath(self.recording).stem

    @property
    def parting(self) -> str:
        return f"at step {self.step}" + f", changed by {self.change}" * bool(self.change)


def ancestors(first: AttemptRecord) -> list[Parent]:
    loads = (entry for entry in first.entries if isinstance(entry, EventEntry) and entry.event == "checkpoint_loaded")
    loaded = next(loads, None)
    found = list(_chain(loaded.data.get("forked_from")) if loaded is not None else ()) or _from_start(first)
    change = first.hyper_parameters.get(CHANGE)
    if found and isinstance(change, str):
        found[0] = replace(found[0], change=change.rpartition("<locals>.")[2])
    return found


def parting_clock(first: AttemptRecord, step: int) -> float:
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
        recording, step, training = parent.get("recording", ""), parent.get("step", -1), parent.get("training", "")
        if not is_text(recording) or not is_count(step) or not is_text(training):
            return
        yield Parent(recording, step, training)
        parent = parent.get("forked_from")


def _from_start(first: AttemptRecord) -> list[Parent]:
    given = first.hyper_parameters.get(PARENT)
    recording, between, step = given.rpartition(BETWEEN) if isinstance(given, str) else ("", "", "")
    return [Parent(recording, int(step))] if between and step.isascii() and step.isdecimal() else []
