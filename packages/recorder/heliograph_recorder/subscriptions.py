"""The subscriptions of a recorder in addition to its marked handlers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from heliograph import Lane, Log, OrderedSignal, Run
from heliograph.events import CATALOGUE, Event, PluginName
from heliograph.spi import Receiver, Subscription


class ExtraSubscriptions:
    """Connects a recorder to custom events, and disconnects it from events that would cost time without other handlers.

    Without a handler of `Log` the loop collects no losses; without one of `Replay` it logs a line instead. A recorder
    changes neither: it receives these events only if others do.

    Args:
        owner: the recorder's name on the bus.
        custom: the handler of events that are not in the catalogue.
        optional: by event, the handlers that are called only if there are others.
        always: by event, a handler that is called although the recorder was switched off, until it is closed.
    """

    def __init__(
        self,
        owner: str,
        custom: Receiver,
        optional: Mapping[type[Event], Sequence[Receiver]],
        always: Mapping[type[Event], Receiver],
    ) -> None:
        self._owner, self._custom, self._optional, self._always = PluginName(owner), custom, optional, always
        self._connected: dict[OrderedSignal[Any], Receiver] = {}

    def attach(self, run: Run) -> None:
        for event, handlers in self._optional.items():
            self._pause_or_resume(run, event, handlers)
        for event, handler in self._always.items():
            self._connect(run.bus.signal(event), handler)
        for signal in run.bus.signals():
            if signal.event not in CATALOGUE:
                self._connect(signal, self._custom)

    def detach(self) -> None:
        for signal, handler in self._connected.items():
            signal.disconnect(handler)
        self._connected.clear()

    def _connect(self, signal: OrderedSignal[Any], handler: Receiver) -> None:
        if signal not in self._connected:
            subscription = Subscription((Lane.TRANSFORM, sys.maxsize), self._owner)
            signal.connect(handler, weak=False, subscription=subscription)
            self._connected[signal] = handler

    def _pause_or_resume(self, run: Run, event: type[Event], handlers: Sequence[Receiver]) -> None:
        signal = run.bus.signal(event)
        owners = {each.owner for each in signal.subscriptions.values() if not each.paused}
        wanted = bool(owners - {self._owner})
        if event is Log and not wanted:  # a plugin may request logs although none handles them
            wanted = "log" in run.plugins.declared("asks")
        if wanted != (self._owner in owners):
            for handler in handlers:
                signal.pause(handler, paused=not wanted)
