"""What a recorder hears beside the events that its handlers are marked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...events import CATALOGUE, Event, Lane, Log, OrderedSignal, Run
from ...events.bus import PluginName, Receiver, Subscription


class Listening:
    """Connects to events that are not of the catalogue, and stays away from those that would cost to be heard.

    Where nobody hears `Log`, the loop spares itself the means; where nobody hears `Replay`, it logs a line instead. A
    recorder changes neither: it listens only where others do.

    Args:
        owner: the recorder's name on the bus.
        foreign: what hears the events that are not of the catalogue.
        following: by event, the handlers that hear it only where others do.
    """

    def __init__(self, owner: str, foreign: Receiver, following: Mapping[type[Event], Sequence[Receiver]]) -> None:
        self._owner, self._foreign, self._following = PluginName(owner), foreign, following
        self._connected: list[OrderedSignal[Any]] = []

    def attach(self, run: Run) -> None:
        """Listen to what there is by now."""
        for event, handlers in self._following.items():
            self._follow(run, event, handlers)
        for signal in run.bus.signals():
            if signal.event not in CATALOGUE and signal not in self._connected:
                signal.connect(
                    self._foreign, weak=False, subscription=Subscription((Lane.TRANSFORM, sys.maxsize), self._owner)
                )
                self._connected.append(signal)

    def detach(self) -> None:
        """Let go of the events that are not of the catalogue."""
        for signal in self._connected:
            signal.disconnect(self._foreign)
        self._connected.clear()

    def _follow(self, run: Run, event: type[Event], handlers: Sequence[Receiver]) -> None:
        signal = run.bus.signal(event)
        heard_by = {seat.owner for seat in signal.subscriptions.values() if not seat.paused}
        wanted = bool(heard_by - {self._owner})
        if event is Log and not wanted:  # a log that nobody hears, but somebody asks for
            wanted = "log" in run.plugins.declared("asks")
        if wanted != (self._owner in heard_by):
            for handler in handlers:
                signal.pause(handler, paused=not wanted)
