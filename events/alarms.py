"""Receivers that say until which count they have nothing to do: one comparison for all of them, not a call each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from .progress import Progress

Count = Callable[[Progress], float]
# A count of the progress, which never decreases, and the value of it that is waited for. No handler may move it: it is
# looked at before the first one is called.
Alarm = tuple[Count, float]
Idle = Callable[[Any], Alarm | None]  # of the run; None where nothing of the kind is known
Receiver = Callable[..., Any]
Forgive = Callable[[str, Any, Any, BaseException], bool]  # of the owner, the run, the event and the error


class Place(Protocol):
    """What is read of a run."""

    origin: Progress
    progress: Progress


class Alarms:
    """The next counts at which some receivers may have something to do.

    They are asked for them at the first emission in a run, and again after each at which one of the counts was reached.
    A state that is loaded gives the run a new `origin`, at which nothing that was known before counts any more.

    Args:
        idle: what says until when each of the receivers is idle, with the owner's name.
        forgive: returns whether the emission continues in spite of an owner's error.
    """

    __slots__ = ("_dues", "_forgive", "_idle", "_origin")

    def __init__(self, idle: Iterable[tuple[Idle, str]], forgive: Forgive) -> None:
        self._idle, self._forgive = tuple(idle), forgive
        self._origin: Progress | None = None
        self._dues: tuple[Alarm, ...] | None = None

    def are_due(self, run: Place, event: object) -> bool:
        """Return whether a receiver may have something to do now."""
        if self._origin is not run.origin:
            self._origin, self._dues = run.origin, self._ask(run, event)
        if self._dues is None:
            return True
        progress = run.progress
        for count, due in self._dues:
            if count(progress) >= due:
                self._origin = None  # ask again at the next emission
                return True
        return False

    def _ask(self, run: Place, event: object) -> tuple[Alarm, ...] | None:
        """Return the least due value of each count; None where a receiver does not say one, or fails to."""
        dues: dict[Count, float] = {}
        for until, owner in self._idle:
            try:
                alarm = until(run)
            except BaseException as error:  # it counts as an error of its handler
                if not self._forgive(owner, run, event, error):
                    raise
                return None
            if alarm is None:
                return None
            count, due = alarm
            dues[count] = min(due, dues.get(count, due))
        return tuple(dues.items())


def alarms_of(
    known: Mapping[Any, Any], positions: Mapping[Any, Any], chain: Sequence[Receiver], forgive: Forgive
) -> tuple[tuple[Receiver, ...], Alarms | None]:
    """Return the receivers of a chain that are called at every emission, and the alarms of the others, if any.

    Args:
        known: the `Subscription` of each receiver, by blinker's key.
        positions: of the receivers of the chain, by the same key.
        chain: the receivers by their position.
        forgive: see `Alarms`.
    """
    idle, awake = list[tuple[Idle, str]](), list[Receiver]()
    for key, receiver in zip(sorted(positions, key=positions.__getitem__), chain, strict=True):
        if (until := _idle_until(known[key])) is None:
            awake.append(receiver)
        else:
            idle.append((until, known[key].owner))
    return tuple(awake), Alarms(idle, forgive) if idle else None


def _idle_until(subscription: Any) -> Idle | None:
    """Return what says until when a receiver is idle; None where it is asked each time, as a plugin's condition is."""
    if subscription.gate is not None:
        return None
    if subscription.when is None:
        idle: Idle | None = subscription.idle_until
    else:
        idle = getattr(subscription.when, "idle_until", None)
    return idle if callable(idle) else None
