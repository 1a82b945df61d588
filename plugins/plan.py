"""The resolved order of the handlers of every event, for people."""

from __future__ import annotations

from collections.abc import Iterable

from ..events import Bus, Lane, Run
from .entry import PluginEntry
from .states import Forgive


class Lines(str):
    """A text of several lines that a REPL shows as such."""

    def __repr__(self) -> str:
        return str(self)


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
    return Lines("\n".join(lines) or "no handlers")


def descriptions(entries: Iterable[PluginEntry], run: Run, forgive: Forgive) -> dict[str, str]:
    """Return what each active plugin says that it will do in a run, by its name, where it says something."""
    texts: dict[str, str] = {}
    for entry in entries:
        if not (entry.is_active and hasattr(entry.plugin, "describe")):
            continue
        try:
            texts[entry.name] = entry.plugin.describe(run)
            if entry.gate is not None:
                texts[entry.name] = f"{texts[entry.name]}, {entry.gate.condition}".lstrip(", ")
        except BaseException as error:
            if not forgive(entry, "describe", "it cannot say what it will do", error):
                raise
    return {name: text for name, text in texts.items() if text}
