"""The resolved order of everything that hears an event, for people."""

from __future__ import annotations

from ..events import Bus, Lane


def plan(bus: Bus) -> str:
    """Return, for every event that anything hears, who hears it and in which order."""
    lines: list[str] = []
    for signal in bus.signals():
        seats = sorted(signal.seats.values(), key=lambda seat: seat.order)
        if seats:
            lines.append(signal.event.name)
        for seat in seats:
            lane = Lane(int(seat.order[0])).name if seat.order[0] <= max(Lane) else "last"
            lines.append(f"  {lane:<9} {seat.owner}{' (off)' * seat.paused}")
    return "\n".join(lines) or "nobody hears anything"
