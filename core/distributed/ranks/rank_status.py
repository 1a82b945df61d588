"""Where a rank is, for reports of hangs: in which collective, at which place of its run, in which functions."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Literal, Self

from torch.distributed.distributed_c10d import Store

from ....events import CATALOGUE, Event, Lane, Run
from ....events import catalogue as ev
from ....events.bus import FunctionName, Handle, Subscription
from ....events.errors import place_of
from .failure import JsonFacts

ANSWERS = 2.0  # seconds in which a living rank answers
FRAMES = 6  # how many functions a report names
BELOW = ("torch.", "heliograph.core.distributed.ranks.", "heliograph.core.engines.")  # in every collective the same


@dataclass(frozen=True, slots=True)
class RankStatus(JsonFacts):
    """What one rank reports of itself.

    Attributes:
        state: it waits in a collective, it works outside of any, or it leaves since one broke.
        collective: in which it waits, or which broke.
        seconds: since when it waits.
        place: where its run is; empty outside of a run.
        functions: those that its main thread is in, the innermost first; empty where it leaves.
    """

    state: Literal["waits", "works", "leaves"]
    collective: str
    seconds: float
    place: str
    functions: str

    @classmethod
    def of(cls, thread: int, waiting: tuple[str, float] | None, place: str, *, leaves: bool) -> Self:
        """Return where the thread of this number is."""
        name, since = waiting or ("", monotonic())
        state: Literal["waits", "works", "leaves"] = "leaves" if leaves else "waits" if waiting else "works"
        frame = None if leaves else sys._current_frames().get(thread)
        functions = _functions(frame, everything=waiting is None)
        return cls(state, name, monotonic() - since, place, functions)

    def __str__(self) -> str:
        kinds = {
            "waits": f"waits in {self.collective} for {self.seconds:.0f} s",
            "works": "is in no collective",
            "leaves": "was waiting too, and leaves now",
        }
        parts = [kinds[self.state], self.place, self.functions and f"at {self.functions}"]
        return "; ".join(part for part in parts if part)


class Roll:
    """One call of the roll: every rank's watch answers where it is.

    Args:
        name: the prefix of the answers' keys.
        world_size: how many ranks there are.
        is_report: whether it is to be logged.

    Attributes:
        answers: where those are that have answered, by rank.
        missing: the ranks that have not.
        limit: seconds until the roll is closed.
        done: set when it is.
    """

    def __init__(self, name: str, world_size: int, *, is_report: bool) -> None:
        self.name, self.is_report, self.limit = name, is_report, ANSWERS
        self.answers: dict[int, RankStatus] = {}
        self.missing = list(range(world_size))
        self.done = threading.Event()
        self._end = monotonic() + self.limit

    @property
    def working(self) -> list[int]:
        """The ranks that are in no collective, though others are or were."""
        return [rank for rank, status in sorted(self.answers.items()) if status.state == "works"]

    def collect(self, store: Store) -> bool:
        """Read what has come; return whether the roll is closed."""
        for rank in self.missing[:]:
            if store.check([key := f"{self.name}/{rank}"]):
                self.answers[rank] = RankStatus.read(store.get(key))
                self.missing.remove(rank)
        if not self.missing or monotonic() > self._end:
            self.done.set()
        return self.done.is_set()

    def __str__(self) -> str:
        lines = {rank: str(status) for rank, status in self.answers.items()}
        lines |= dict.fromkeys(self.missing, f"gives no sign of life for {self.limit:g} s")
        return "\n".join(f"  rank {rank} {lines[rank]}" for rank in sorted(lines))


def _functions(frame: FrameType | None, *, everything: bool) -> str:
    names: list[str] = []
    while frame is not None and len(names) < FRAMES:
        code = frame.f_code
        if everything or not str(frame.f_globals.get("__name__")).startswith(BELOW):
            names.append(f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(names)


WATCH = FunctionName("watch_of_ranks")  # what plans and times call it
OF_BATCHES = (ev.BatchStart, ev.ForwardEnd, ev.BackwardEnd, ev.GradientsReady, ev.StepEnd)
QUIET = (*OF_BATCHES, ev.Log, ev.ShouldStop, ev.Replay)  # a listener changes the loop, or costs time in every batch


def follow(run: Run) -> tuple[Callable[[], str], Callable[[], None]]:
    """Subscribe to a run; return what shows where it is, and what ends the subscription."""
    last = ""

    def note(_: Run, *, event: Event) -> None:
        nonlocal last
        last = event.name

    def place() -> str:
        return f"{place_of(run)}, last event {last or 'none'}"

    handles = ExitStack()
    for kind in CATALOGUE:
        if kind not in QUIET:
            signal, last_of_lane = run.bus.signal(kind), Subscription((Lane.REPORT, sys.maxsize), WATCH)
            signal.connect(note, weak=False, subscription=last_of_lane)
            handles.enter_context(Handle(signal, note))
    return place, handles.close
