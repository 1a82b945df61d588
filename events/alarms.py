"""Receivers that say until which count they have nothing to do: one comparison for all of them, not a call each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from .checks import describe, is_number
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
        chain: all receivers, in their order.
        idle: what says until when each of them is idle, None where it never is, with the owner's name.
        forgive: returns whether the emission continues in spite of an owner's error.
    """

    __slots__ = ("_awake", "_chain", "_dues", "_forgive", "_idle", "_origin")

    def __init__(self, chain: tuple[Receiver, ...], idle: Iterable[tuple[Idle | None, str]], forgive: Forgive) -> None:
        self._chain, self._idle, self._forgive = chain, tuple(idle), forgive
        self._origin: Progress | None = None
        self._awake = chain
        self._dues: tuple[Alarm, ...] = ()

    def receivers(self, run: Place, event: object) -> tuple[Receiver, ...]:
        """Return all if one may have something to do now, else those that do not say until when they are idle."""
        if self._origin is not run.origin:
            self._ask(run, event)
        progress = run.progress
        for count, due in self._dues:
            if count(progress) >= due:
                self._origin = None  # ask again at the next emission
                return self._chain
        return self._awake

    def _ask(self, run: Place, event: object) -> None:
        """Take the least due value of each count; who says none, or fails to, is awake."""
        dues: dict[Count, float] = {}
        awake = list[Receiver]()
        for receiver, (until, owner) in zip(self._chain, self._idle, strict=True):
            try:
                alarm = None if until is None else until(run)
                if alarm is not None:
                    count, due = _checked(alarm, until)
                    dues[count] = min(due, dues.get(count, due))
                    continue
            except BaseException as error:  # it counts as an error of its handler
                error.add_note(f"Plugin {owner!r} was asked until when {describe(receiver)} is idle")
                if not self._forgive(owner, run, event, error):
                    raise
            awake.append(receiver)
        self._origin, self._awake, self._dues = run.origin, tuple(awake), tuple(dues.items())


def alarms_of(
    known: Mapping[Any, Any], positions: Mapping[Any, Any], chain: tuple[Receiver, ...], forgive: Forgive
) -> Alarms | None:
    """Return the alarms of a chain, None if none of its receivers is ever idle.

    Args:
        known: the `Subscription` of each receiver, by blinker's key.
        positions: of the receivers of the chain, by the same key.
        chain: the receivers by their position.
        forgive: see `Alarms`.
    """
    idle = [(_idle_until(known[key]), known[key].owner) for key in sorted(positions, key=positions.__getitem__)]
    return Alarms(chain, idle, forgive) if any(until is not None for until, _ in idle) else None


def _checked(alarm: object, until: Any) -> Alarm:
    match alarm:
        case (count, due) if callable(count) and is_number(due):
            return count, due
    raise TypeError(
        f"{describe(until)} returned {alarm!r}: give a function of the progress, and the value of it to wait for, "
        f"such as (attrgetter('steps'), 1000); or None where it is not known."
    )


def _idle_until(subscription: Any) -> Idle | None:
    """Return what says until when a receiver is idle; None where it is asked each time, as a plugin's condition is."""
    if subscription.gate is not None:
        return None
    if subscription.when is None:
        idle: Idle | None = subscription.idle_until
    else:
        idle = getattr(subscription.when, "idle_until", None)
    return idle if callable(idle) else None
