"""What a run's watch knows of the run: read by another thread, so that the loop pays next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ....events import CATALOGUE, Event, Lane, Run
from ....events import catalogue as ev
from ....events.errors import place_of

QUIET = (ev.BatchStart, ev.GradientsReady, ev.StepEnd, ev.Log, ev.ShouldStop, ev.Replay)  # a listener changes the loop


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
            handles.enter_context(run.bus.on(kind, note, lane=Lane.REPORT))
    return place, handles.close
