"""A context after which everything is as it was: what objects hold, every random generator."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..data.draws import rng
from .objects import KeptObjects


@dataclass(frozen=True, slots=True)
class Former:
    """What there was before.

    Attributes:
        objects: what the objects held.
        draws: the states of the global generators.
    """

    objects: KeptObjects
    draws: dict[str, Any]

    def restore(self) -> None:
        """Put it back; a Ctrl-C waits until that is done."""
        with _interrupts_postponed():
            self.objects.restore()
            rng.restore(self.draws)


@contextmanager
def restored(
    users: Iterable[Any], data: Iterable[Any] = (), ours: Iterable[Any] = (), leave: Iterable[Any] = ()
) -> Iterator[Former]:
    """Put everything back when this context is left, also by an exception; see `KeptObjects` for the arguments."""
    former = Former(KeptObjects(users, data, ours, leave), rng.capture())
    try:
        yield former
    finally:
        former.restore()


@contextmanager
def _interrupts_postponed() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    former = signal.signal(signal.SIGINT, lambda *received: came.append(received[0]))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if came:
        raise KeyboardInterrupt
