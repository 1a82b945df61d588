"""The resolved order of the handlers of every event, for people."""

from __future__ import annotations

from ..events import Bus, Lane


def plan(bus: Bus) -> str:
    """Return the handlers of every event that has some, in their order."""
    lines: list[str] = []
    for signal in bus.signals():
        subscriptions = sorted(signal.subscriptions.values(), key=lambda subscription: subscription.position)
        if subscriptions:
            lines.append(signal.event.name)
        for subscription in subscriptions:
            lane = Lane(int(subscription.position[0])).name if subscription.position[0] <= max(Lane) else "last"
            marks = " (off)" * subscription.paused + " (on a condition)" * (subscription.gate is not None)
            lines.append(f"  {lane:<9} {subscription.owner}{marks}")
    return "\n".join(lines) or "no handlers"
