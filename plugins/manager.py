"""The trainer's plugins: register, order, look up, toggle, keep their state."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from ..events import Bus, Event, Lane, OrderedSignal, Run
from ..events.checks import check_receiver
from ..events.suggest import known_names
from .discovery import KILL_SWITCH, Discovered, discover, find, switched_off
from .marks import marked_methods
from .order import Handler, resolve
from .plugin import Plugin, snake_case

T = TypeVar("T")
Key = str | type | object
logger = logging.getLogger("heliograph")


@dataclass(slots=True)
class Registered:
    """A plugin and what the manager knows of it."""

    name: str
    plugin: Any
    handlers: dict[type[Event], list[Handler]]
    enabled: bool = True
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StateReport:
    """What did not match when plugin states were loaded."""

    missing: tuple[str, ...]
    """Registered plugins with state that the checkpoint does not hold: they start fresh."""
    unknown: tuple[str, ...]
    """States in the checkpoint that no registered plugin claims: they are left out."""


class Plugins:
    """All plugins of one trainer. Every change is legal at any moment and takes effect from the next event."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._entries: dict[str, Registered] = {}
        self._retired: list[Any] = []
        self._running = False
        self._connected: dict[type[Event], dict[Callable[..., Any], str]] = {}
        bus.forgiver = self._forgive

    def register(self, plugin: T, *, name: str | None = None) -> T:
        """Subscribe the `@on` methods of an object. A failed registration leaves nothing behind.

        Args:
            plugin: any object with `@on` methods.
            name: its name here; by default its `name` attribute, else its class name in snake case.

        Returns:
            The plugin.

        Raises:
            TypeError: not a plugin, or a handler whose signature or annotation does not fit its event.
            ValueError: a name or an exclusive capability is taken, or the order has a cycle.
        """
        if isinstance(plugin, type):
            raise TypeError(
                f"register() takes a plugin object, got the class {plugin.__name__}: {plugin.__name__}(...)."
            )
        own = getattr(plugin, "name", None)
        name = name or (own if isinstance(own, str) else snake_case(type(plugin).__name__))
        entry = Registered(name, plugin, _handlers_of(plugin, name))
        self._check(entry)
        orders = self._resolved([*self._entries.values(), entry])
        if switched_off(name):
            entry.enabled = False
            warnings.warn(f"Plugin {name!r} is switched off by {KILL_SWITCH}.", RuntimeWarning, stacklevel=2)
        self._entries[name] = entry
        self._connect(orders)
        return plugin

    def unregister(self, key: Key) -> Any:
        """Disconnect and close a plugin, given by name, class or object; return it."""
        entry = self._find(key)
        del self._entries[entry.name]
        self._connect(self._resolved(self._entries.values()))
        self._retire(entry)
        return entry.plugin

    def load(self, name: str, **options: Any) -> Any:
        """Import an installed plugin by its entry-point name, make it with `options` and register it.

        Returns:
            The plugin; None, with a warning, where the kill-switch names it.

        Raises:
            LookupError: no installed plugin has this name.
            ImportError: it cannot be imported.
        """
        found = find(name)
        if found.switched_off:
            warnings.warn(f"Plugin {name!r} is switched off by {KILL_SWITCH}.", RuntimeWarning, stacklevel=2)
            return None
        return self.register(found.load()(**options))

    @staticmethod
    def available() -> list[Discovered]:
        """Return the installed plugins, from metadata only."""
        return discover()

    def enable(self, *keys: Key) -> None:
        """Let plugins hear again, each in its old place."""
        for entry in [self._find(key) for key in keys]:
            self._toggle(entry, enabled=True)

    def disable(self, *keys: Key) -> None:
        """Silence plugins; they keep their place and their state."""
        for entry in [self._find(key) for key in keys]:
            self._toggle(entry, enabled=False)
            self._retire(entry)

    @contextmanager
    def disabled(self, *keys: Key) -> Iterator[None]:
        """Silence plugins for a while; those that were silent before stay so."""
        entries = [entry for entry in (self._find(key) for key in keys) if entry.enabled]
        self.disable(*(entry.name for entry in entries))
        try:
            yield
        finally:
            for entry in entries:
                if self._entries.get(entry.name) is entry:
                    self._toggle(entry, enabled=True)

    def is_enabled(self, key: Key) -> bool:
        """Return whether a plugin hears events."""
        return self._find(key).enabled

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: type[T]) -> T: ...
    def __getitem__(self, key: Any) -> Any:
        """Return a plugin by its name or class."""
        return self._find(key).plugin

    def __contains__(self, key: Key) -> bool:
        return bool(self._matches(key))

    def __iter__(self) -> Iterator[Any]:
        return (entry.plugin for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> list[str]:
        """Return the names in the order of registration."""
        return list(self._entries)

    def declared(self, attribute: str) -> dict[str, list[str]]:
        """Return, for each word of an attribute such as `asks`, the names of the enabled plugins that declare it."""
        words: dict[str, list[str]] = {}
        for entry in self._entries.values():
            for word in getattr(entry.plugin, attribute, ()) if entry.enabled else ():
                words.setdefault(word, []).append(entry.name)
        return words

    def errors(self) -> dict[str, tuple[str, ...]]:
        """Return the forgiven errors of the observers."""
        return {entry.name: tuple(entry.errors) for entry in self._entries.values() if entry.errors}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of every plugin's state by name."""
        stateful = [entry for entry in self._entries.values() if hasattr(entry.plugin, "state_dict")]
        return {entry.name: deepcopy(entry.plugin.state_dict()) for entry in stateful}

    def load_state_dict(self, states: Mapping[str, Any]) -> StateReport:
        """Give every registered plugin its saved state; names without a match are reported, never an error."""
        mine = {entry.name: entry.plugin for entry in self._entries.values() if hasattr(entry.plugin, "state_dict")}
        for name, plugin in mine.items():
            if name in states:
                plugin.load_state_dict(deepcopy(states[name]))
        missing = tuple(name for name, plugin in mine.items() if name not in states and plugin.state_dict())
        return StateReport(missing, tuple(name for name in states if name not in mine and states[name]))

    def open(self) -> None:
        """At a run's start: observers begin with a clean slate.

        Raises:
            RuntimeError: a run of this trainer goes on already.
        """
        if self._running:
            raise RuntimeError(
                "This trainer is in a run, and its plugins belong to that run until it ends: use another Trainer."
            )
        self._running = True
        for entry in self._entries.values():
            entry.errors.clear()

    def close(self) -> list[tuple[str, Exception]]:
        """At a run's end: close every plugin, those too that left while it went on; return the errors by name."""
        self._running = False
        retired, self._retired = self._retired, []
        errors: list[tuple[str, Exception]] = []
        for plugin in (*self, *retired):
            try:
                if isinstance(plugin, Plugin):
                    plugin.close()
            except Exception as error:  # noqa: BLE001  # the others must be closed too; the caller raises it
                errors.append((plugin.name, error))
        return errors

    def plan(self) -> str:
        """Return, for every event that anything hears, who hears it and in which order."""
        lines: list[str] = []
        for signal in self._bus.signals():
            listeners = list(signal.listeners())
            if listeners:
                lines.append(signal.event.name)
                lines += [f"  {_lane(order):<9} {owner}{' (off)' * paused}" for owner, order, paused in listeners]
        return "\n".join(lines) or "nobody hears anything"

    # Within.

    def _check(self, entry: Registered) -> None:
        if entry.name in self._entries:
            raise ValueError(
                f"A plugin named {entry.name!r} is registered already: give this one another name, as in "
                f"{type(entry.plugin).__name__}(...).named('{entry.name}_2')."
            )
        claimed = {word: other for other in self._entries.values() for word in getattr(other.plugin, "exclusive", ())}
        for word in getattr(entry.plugin, "exclusive", ()):
            if word in claimed:
                raise ValueError(
                    f"Plugins {claimed[word].name!r} and {entry.name!r} both claim {word!r}, which only one may: "
                    f"unregister one of them."
                )
        if hasattr(entry.plugin, "state_dict") != hasattr(entry.plugin, "load_state_dict"):
            raise TypeError(
                f"Plugin {entry.name!r} has one of state_dict and load_state_dict: it needs both or neither."
            )

    def _resolved(self, entries: Iterable[Registered]) -> dict[type[Event], list[Handler]]:
        by_event: dict[type[Event], list[Handler]] = {event: [] for event in self._connected}
        for entry in entries:
            for event, handlers in entry.handlers.items():
                by_event.setdefault(event, []).extend(handlers)
        return {event: resolve(handlers, event.__name__) for event, handlers in by_event.items()}

    def _connect(self, orders: Mapping[type[Event], list[Handler]]) -> None:
        for event, handlers in orders.items():
            signal: OrderedSignal[Any] = self._bus.signal(event)
            before = self._connected.get(event, {})
            after = {handler.method: handler.plugin for handler in handlers}
            for method in before:
                if method not in after:
                    signal.disconnect(method)
            for place, handler in enumerate(handlers):
                mark = handler.subscription
                if handler.method in before:
                    signal.place(handler.method, (mark.lane, place))
                    continue
                order = (mark.lane, place)
                signal.connect(handler.method, weak=False, order=order, owner=handler.plugin, when=deepcopy(mark.when))
                if not self._entries[handler.plugin].enabled:
                    signal.pause(handler.method)
            self._connected[event] = after

    def _toggle(self, entry: Registered, *, enabled: bool) -> None:
        entry.enabled = enabled
        for event, handlers in entry.handlers.items():
            for handler in handlers:
                self._bus.signal(event).pause(handler.method, paused=not enabled)

    def _retire(self, entry: Registered) -> None:
        """Close now, and once more at the run's end: a dispatch under way may still call the plugin once."""
        if isinstance(entry.plugin, Plugin):
            entry.plugin.close()
            self._retired.append(entry.plugin)

    def _forgive(self, owner: str, run: Run, event: Event, error: Exception) -> bool:
        """Log and count an observer's error; switch it off after `max_errors`."""
        entry = self._entries.get(owner)
        if entry is None or getattr(entry.plugin, "policy", "critical") != "observer":
            return False
        entry.errors.append(f"{event.name} at step {run.progress.steps}: {type(error).__name__}: {error}")
        logger.error("plugin %r failed in %s", owner, event.name, exc_info=error)
        if len(entry.errors) >= getattr(entry.plugin, "max_errors", 3) and entry.enabled:
            logger.error("plugin %r is switched off after %d errors", owner, len(entry.errors))
            self._toggle(entry, enabled=False)
        return True

    def _matches(self, key: Key) -> list[Registered]:
        if isinstance(key, str):
            return [self._entries[key]] if key in self._entries else []
        if isinstance(key, type):
            return [entry for entry in self._entries.values() if isinstance(entry.plugin, key)]
        return [entry for entry in self._entries.values() if entry.plugin is key]

    def _find(self, key: Key) -> Registered:
        matches = self._matches(key)
        if len(matches) == 1:
            return matches[0]
        given = key.__name__ if isinstance(key, type) else key if isinstance(key, str) else type(key).__name__
        if matches:
            names = ", ".join(entry.name for entry in matches)
            raise LookupError(f"Several plugins are of class {given}: choose by name, one of {names}.")
        raise LookupError(f"No plugin {given!r} is registered.{known_names(given, self._entries)}")


def _handlers_of(plugin: object, name: str) -> dict[type[Event], list[Handler]]:
    handlers: dict[type[Event], list[Handler]] = {}
    for method_name, mark in marked_methods(plugin):
        method = getattr(plugin, method_name)
        for event in mark.events:
            check_receiver(method, event)
            handlers.setdefault(event, []).append(Handler(name, method, mark))
    if not handlers:
        raise TypeError(
            f"{plugin!r} has no handler: mark a method with @on, as in\n"
            f"    @on(EpochEnd)\n    def report(self, run: Run, event: EpochEnd) -> None: ..."
        )
    return handlers


def _lane(order: tuple[int, ...]) -> str:
    return Lane(order[0]).name if order[0] in list(Lane) else "last"
