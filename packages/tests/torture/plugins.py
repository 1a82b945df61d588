"""The plugins of a user of random programs: they count, draw, ask and meddle, and keep all of it in their states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import heliograph as h
from heliograph.packages.tests.torture.samples import draw

if TYPE_CHECKING:
    from heliograph.packages.tests.torture.program import Ask, Program


class Draws(h.Plugin):
    """Counts and draws at some events."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.drawn = 0.0

    def take(self, run: h.Run, event: h.Event) -> None:
        if isinstance(event, h.EpochStart) and event.resumed:  # it had begun before
            return
        self.counts[event.name] = self.counts.get(event.name, 0) + 1
        self.drawn = self.drawn * 0.9 + draw()

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts, self.drawn = dict(state["counts"]), state["drawn"]


class Asks(h.Plugin):
    """Asks for something at every n-th emission of an event."""

    def __init__(self, ask: Ask) -> None:
        self.what, self.every, self.count = ask.what, ask.every, ask.every - ask.first

    def take(self, run: h.Run, event: h.Event) -> None:
        if isinstance(event, h.EpochStart) and event.resumed:
            return
        self.count += 1
        if self.count % self.every == 0:
            verb = self.what if self.what == "end_epoch" else f"request_{self.what}"
            getattr(run.control, verb)("it is time")

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class Meddles(h.Plugin):
    """Leaves out a batch now and then, and scales the loss, by what it draws."""

    @h.on(h.BatchStart)
    def meddle(self, run: h.Run, event: h.BatchStart) -> None:
        number = draw()
        if number < -1.5:
            run.control.skip_batch("the numbers say so")
        elif number > 1:
            run.control.scale_loss(0.5, "the numbers say so")


def make_listener(plugin: type[h.Plugin], take: Callable[..., None], events: Any, lane: str = "DECIDE") -> type[Any]:
    """Return a class of plugins whose method receives some events, by their classes' names."""

    def received(self: Any, run: h.Run, event: h.Event) -> None:
        take(self, run, event)

    kinds = [getattr(h, name) for name in events]
    return type(
        plugin.__name__, (plugin,), {"received": h.on(*kinds, lane=h.Lane[lane])(received), "name": plugin.name}
    )


def user_plugins(program: Program) -> list[h.Plugin]:
    """Return the plugins of its user that a program has."""
    plugins: list[h.Plugin] = [
        make_listener(Asks, Asks.take, (ask.at,))(ask).named(f"asks_{number}")
        for number, ask in enumerate(program.asks)
    ]
    if program.draws:
        plugins.append(make_listener(Draws, Draws.take, program.draws, program.lane)())
    return [*plugins, *([Meddles()] if program.meddles else [])]
