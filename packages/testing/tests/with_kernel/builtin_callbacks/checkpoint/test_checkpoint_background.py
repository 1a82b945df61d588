"""Checkpoint(background=True): a file holds the cut, nothing is lost, nothing stays unsaid, an idle one is free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from heliograph import Bus, Checkpoint, Event, Lane, Run
from heliograph_testing import check_plugin


def at(bus: Bus, event: type[Event], act: Callable[[Run], object], *, batches: int | None = None) -> None:
    """Do something at an event, before any plugin learns of it."""

    def handle(run: Run, event: Event) -> None:
        if batches in (None, run.progress.batches):
            act(run)

    bus.on(event, handle, lane=Lane.TRANSFORM)


# The cut.


# When it is reported.


# Errors surface.


# Drained on every ending.


def test_it_keeps_every_rule_of_plugins(tmp_path: Path) -> None:
    check_plugin(lambda: Checkpoint(tmp_path, background=True))
