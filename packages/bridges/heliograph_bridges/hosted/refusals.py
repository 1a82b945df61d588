"""Plugins that the loop of a host cannot serve, refused before its training begins."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from heliograph import BatchStart, Lane, Plugins, SavePoint
from heliograph.events import Event
from heliograph.plugins import marked_methods

from .host import Host

DONE_BY_ALL = frozenset({"stop", "end_epoch", "log", "validation", "save"})
BRIDGES = __name__.partition(".hosted")[0]
OWN: Mapping[type[Event], tuple[Lane, str, str]] = {
    BatchStart: (Lane.TRANSFORM, "batches", "replaces run.batch"),
    SavePoint: (Lane.PERSIST, "checkpoints", "writes checkpoints"),
}


def check_plugins(plugins: Plugins, host: Host, does: Collection[str], *, validates: bool) -> None:
    """Raise ValueError where plugins cannot do their work in the loop of a host, with a sentence for each of them.

    Args:
        plugins: the plugins, registered.
        host: whose loop it is.
        does: what the loop does without being asked, of `log`, `validation` and `save`.
        validates: whether there is validation data.
    """
    found: dict[str, str] = {}
    unserved = ((name, each) for name, plugin in _enabled(plugins) for each in _unserved(plugin, host))
    for name, sentence in (*unserved, *_unmet(plugins, host, does, validates=validates)):
        found.setdefault(name, f"Plugin {name!r} {sentence}")
    if found:
        raise ValueError("\n".join(found.values()))


def _unserved(plugin: Any, host: Host) -> Iterator[str]:
    """Yield a sentence for each thing that a plugin does and the host cannot serve."""
    if type(plugin).__module__.startswith(BRIDGES):
        yield (
            f"is a callback of another framework, made for our loop: give {host.name} a callback of its own, or train "
            f"with heliograph.Trainer."
        )
    for word, what in (*_asked(plugin, host), *_done_itself(plugin)):
        yield f"{what}, which {host.name} cannot serve. Leave it out; instead, {host.mend(word)}."
    handled = {event.__name__ for event, _, optional in _handlers(plugin) if event in host.lacks and not optional}
    if lacking := sorted(handled):
        yield (
            f"acts on {' and '.join(lacking)}, for which {host.name} has no place. Leave it out, or train with "
            f"heliograph.Trainer."
        )


def _asked(plugin: Any, host: Host) -> Iterator[tuple[str, str]]:
    """Yield (word, what it does) for what a plugin declares to ask, or to claim, and the host does not do."""
    for word in getattr(plugin, "asks", ()):
        if word not in (DONE_BY_ALL - host.cannot) | host.verbs:
            yield word, f"asks for {word}"
    if "rng" in getattr(plugin, "exclusive", ()):
        yield "rng", "keeps the random generators of the training"


def _done_itself(plugin: Any) -> Iterator[tuple[str, str]]:
    """Yield (word, what it does) for what a plugin does itself, to judge by the lanes of its handlers."""
    for event, lane, _ in _handlers(plugin):
        own_lane, word, what = OWN.get(event, (None, "", ""))
        if lane == own_lane:
            yield word, what


def _handlers(plugin: Any) -> Iterator[tuple[type[Event], Lane, bool]]:
    """Yield the event of each handler of a plugin, its lane and whether it is optional; nothing for an observer."""
    if getattr(plugin, "policy", "critical") == "critical":
        for _, mark in marked_methods(type(plugin)):
            for event in mark.events:
                if event not in getattr(plugin, "ignores", ()):
                    yield event, mark.lane, mark.optional


def _unmet(plugins: Plugins, host: Host, does: Collection[str], *, validates: bool) -> Iterator[tuple[str, str]]:
    """Yield (name, sentence) where a plugin would never act, as nobody asks for what it needs."""
    asked = {word for _, plugin in _enabled(plugins) for word in getattr(plugin, "asks", ())} | set(does)
    for name, plugin in _enabled(plugins):
        for word in getattr(plugin, "needs", ()):
            if word in ("validation", "validation data") and not validates:
                why = f"there is no validation data: give it to {host.name}"
            elif word in asked or word == "validation data":
                continue
            else:
                why = f"{host.name} is not set to do it, and no plugin asks for it"
            yield name, f"would never act: it needs a {word}, {why}."
    if not validates and "validation" in asked - set(does):
        name = plugins.declared("asks")["validation"]
        yield name, f"asks for validations, and {host.name} has no validation data."


def _enabled(plugins: Plugins) -> Iterator[tuple[str, Any]]:
    return ((name, plugins[name]) for name in plugins.names() if plugins.is_enabled(name))
