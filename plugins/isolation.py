"""Isolation of observers: their handlers run apart, so that they cannot change the training's random draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from ..events import Bus, Event, Run
from ..events.bus import Receiver
from .manager import Plugins


class Hooks(Protocol):
    """What a run has for it.

    Attributes:
        closing: left when the run is closed.
    """

    closing: ExitStack

    @property
    def apart(self) -> Callable[[], AbstractContextManager[Any]]:
        """What makes the context that an observer's handler runs in; a plugin may set it at `TrainStart`."""


@contextmanager
def isolation(bus: Bus, plugins: Plugins, hooks: Hooks) -> Iterator[None]:
    """Intercept the handlers of observers, those of `TrainStart` too, in case that a plugin isolates them there."""

    def isolate(receiver: Receiver, owner: str) -> Receiver:
        if not plugins.runs_apart(owner):
            return receiver

        def isolated(run: Run, *, event: Event) -> None:
            with hooks.apart():
                receiver(run, event=event)

        return isolated

    remove = bus.intercept(isolate)
    hooks.closing.callback(remove)
    yield
    if hooks.apart is nullcontext:
        remove()
