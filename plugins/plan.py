"""The resolved order of everything that hears an event, for people."""

from __future__ import annotations

from ..events import Bus, Lane


def plan(bus: Bus) -> str:
    """Return, for every event that anything hears, who hears it and in which order."""
    lines: list[str] = []
    for signal in bus.signals():
        subscriptions = sorted(signal.subscriptions.values(), key=lambda subscription: subscription.position)
        if subscriptions:
            lines.append(signal.event.name)
        for subscription in subscriptions:
            lane = Lane(int(subscription.position[0])).name if subscription.position[0] <= max(Lane) else "last"
            lines.append(f"  {lane:<9} {subscription.owner}{' (off)' * subscription.paused}")
    return "\n".join(lines) or "nobody hears anything"
