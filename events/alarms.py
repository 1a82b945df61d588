"""Receivers that are idle until a known count: one comparison replaces a call of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from .checks import describe, is_number
from .progress import Progress

Count = Callable[[Progress], float]
# A count of the progress that never decreases, and its next value at which the receiver is due. It is read before the
# first receiver of an emission is called, so no handler of the same event may change it.
Alarm = tuple[Count, float]
Idle = Callable[[Any], Alarm | None]  # called with the run
Receiver = Callable[..., Any]
Forgive = Callable[[str, Any, Any, BaseException], bool]  # called with the owner, the run, the event and the error


class HasProgress(Protocol):
    origin: Progress
    progress: Progress


class Alarms:
    """The next counts at which idle receivers must be called again.

    Receivers are queried at the first emission of a run, and again after an emission at which one of the counts was
    reached. A loaded state gives the run a new `origin`, which invalidates the counts.

    Args:
        chain: all receivers, in their order.
        idle: for each receiver, the function that returns its next count (None if there is none) and its owner.
        forgive: returns True if the emission continues after an error of an owner.
    """

    __slots__ = ("_awake", "_chain", "_dues", "_forgive", "_idle", "_origin")

    def __init__(self, chain: tuple[Receiver, ...], idle: Iterable[tuple[Idle | None, str]], forgive: Forgive) -> None:
        self._chain, self._idle, self._forgive = chain, tuple(idle), forgive
        self._origin: Progress | None = None
        self._awake = chain
        self._dues: tuple[Alarm, ...] = ()

    def receivers(self, run: HasProgress, event: object) -> tuple[Receiver, ...]:
        """Return all receivers if one is due, else those without a count."""
        if self._origin is not run.origin:
            self._ask(run, event)
        progress = run.progress
        for count, due in self._dues:
            if count(progress) >= due:
                self._origin = None  # query again at the next emission
                return self._chain
        return self._awake

    def _ask(self, run: HasProgress, event: object) -> None:
        dues: dict[Count, float] = {}
        awake = list[Receiver]()
        for receiver, (until, owner) in zip(self._chain, self._idle, strict=True):
            try:
                alarm = None if until is None else until(run)
                if alarm is not None:
                    count, due = _checked(alarm, until)
                    dues[count] = min(due, dues.get(count, due))
                    continue
            except BaseException as error:  # counts as an error of the handler
                error.add_note(f"heliograph: in idle_until of {describe(receiver)}, plugin {owner!r}")
                if not self._forgive(owner, run, event, error):
                    raise
            awake.append(receiver)
        self._origin, self._awake, self._dues = run.origin, tuple(awake), tuple(dues.items())


def alarms_of(subscriptions: Iterable[Any], chain: tuple[Receiver, ...], forgive: Forgive) -> Alarms | None:
    idle = [(_idle_until(subscription), subscription.owner) for subscription in subscriptions]
    return Alarms(chain, idle, forgive) if any(until is not None for until, _ in idle) else None


def _checked(alarm: object, until: Any) -> Alarm:
    match alarm:
        case (count, due) if callable(count) and is_number(due):
            return count, due
    raise TypeError(
        f"{describe(until)} returned {alarm!r}: return a function of the progress and its next due value, such as "
        f"(attrgetter('steps'), 1000), or None if it is unknown."
    )


def _idle_until(subscription: Any) -> Idle | None:
    if subscription.gate is not None:
        return None
    if subscription.when is None:
        idle_until: Idle | None = subscription.idle_until
    else:
        idle_until = getattr(subscription.when, "idle_until", None)
    return idle_until if callable(idle_until) else None
