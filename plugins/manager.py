"""The trainer's plugins: register, order, look up, toggle, keep their state."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, overload

from ..events import Bus, Engine, Event, PluginChanged, PluginFailed, Progress, Run
from ..events.bus import Seat, current_owner
from ..events.checks import check_receiver, known_names
from .discovery import KILL_SWITCH, Discovered, discover, find, switched_off
from .marks import marked_methods
from .order import Handler, resolve
from .plugin import Plugin, snake_case

T = TypeVar("T")
Key = str | type | object
logger = logging.getLogger("heliograph")


class PluginName(str):
    """A registered plugin's name, told apart from a function that happens to be called the same."""

    __slots__ = ()


@dataclass(slots=True)
class Entry:
    """A registered plugin and what the manager knows of it."""

    name: str
    plugin: Any
    handlers: list[tuple[type[Event], Handler]]
    filters: list[Any]
    enabled: bool = True
    here: bool = True
    given_up: bool = False
    errors: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> str:
        """On which ranks its handlers run."""
        return str(getattr(self.plugin, "ranks", "all"))

    def declared(self, attribute: str) -> tuple[str, ...]:
        """Return a declaration such as `exclusive`; any object may leave it out."""
        words = getattr(self.plugin, attribute, ())
        if isinstance(words, str):
            raise TypeError(f"Plugin {self.name!r} declares {attribute} = {words!r}: give a tuple, ({words!r},).")
        return tuple(words)

    def stateful_filters(self) -> dict[str, Any]:
        """Return the filters of its handlers that count, by `<method>/<event>`; any function of the run is a filter."""
        return {
            f"{handler.method.__name__}/{event.name}": when
            for (event, handler), when in zip(self.handlers, self.filters, strict=True)
            if hasattr(when, "state_dict")
        }


class Plugins:
    """All plugins of one trainer. Every change is legal at any moment and takes effect from the next event."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._entries: dict[str, Entry] = {}
        self._run: Run | None = None  # the one that goes on
        self._engine: Engine | None = None
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
        own = getattr(plugin, "name", None)
        name = name or (own if isinstance(own, str) else snake_case(type(plugin).__name__))
        handlers = list(_handlers_of(plugin, name))
        filters = [deepcopy(handler.mark.when) for _, handler in handlers]
        entry = Entry(name, plugin, handlers, filters, enabled=not switched_off(name))
        self._check(entry)
        entry.here = self._is_here(entry)
        order = _resolved([*self._entries.values(), entry])
        if not entry.enabled:
            warnings.warn(f"Plugin {name!r} is switched off by {KILL_SWITCH}.", RuntimeWarning, stacklevel=2)
        self._entries[name] = entry
        for (event, handler), when in zip(entry.handlers, filters, strict=True):
            seat = Seat((handler.mark.lane,), PluginName(name), when, paused=not (entry.enabled and entry.here))
            self._bus.signal(event).connect(handler.method, weak=False, seat=seat)
        self._place(order)
        self._tell(name, "registered")
        return plugin

    def unregister(self, key: Key) -> Any:
        """Disconnect and close a plugin, given by name, class or object; return it."""
        entry = self._find(key)
        del self._entries[entry.name]
        for event, handler in entry.handlers:
            self._bus.signal(event).disconnect(handler.method)
        self._place(_resolved(self._entries.values()))
        self._retire(entry)
        self._tell(entry.name, "unregistered")
        return entry.plugin

    def load(self, name: str, /, **options: Any) -> Any:
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
            if switched_off(entry.name):
                warnings.warn(f"{entry.name!r} stays off, {KILL_SWITCH} names it.", RuntimeWarning, stacklevel=2)
            else:
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
        return iter([entry.plugin for entry in self._entries.values()])

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> list[str]:
        """Return the names in the order of registration."""
        return list(self._entries)

    def declared(self, attribute: str) -> dict[str, str]:
        """Return, for each word of a declaration such as `asks`, the name of an enabled plugin that declares it."""
        enabled = [entry for entry in self._entries.values() if entry.enabled]
        return {word: entry.name for entry in enabled for word in entry.declared(attribute)}

    def runs_apart(self, owner: str) -> bool:
        """Return whether the handlers of this owner must not disturb the training's random stream."""
        entry = self._entries.get(owner) if isinstance(owner, PluginName) else None
        if entry is None or getattr(entry.plugin, "policy", "critical") != "observer":
            return False
        return bool(getattr(entry.plugin, "draws", True))

    def errors(self) -> dict[str, tuple[str, ...]]:
        """Return the forgiven errors of the observers."""
        return {entry.name: tuple(entry.errors) for entry in self._entries.values() if entry.errors}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of every plugin's state by name."""
        return {name: deepcopy(plugin.state_dict()) for name, plugin in self._stateful().items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Give every plugin its saved state; an empty one is of a version of it that had none.

        Returns:
            The names of plugins that have state but found none, and the names of states that nobody claimed.
        """
        mine = self._stateful()
        missing = [name for name, plugin in mine.items() if not states.get(name) and plugin.state_dict()]
        for name, plugin in mine.items():
            if states.get(name):
                plugin.load_state_dict(deepcopy(states[name]))
        return missing, [name for name, state in states.items() if state and name not in mine]

    def filter_states(self, origin: Progress) -> dict[str, Any]:
        """Return the state of every handler's filter, by the plugin's name and `<method>/<event>`."""
        names = [entry.name for entry in self._entries.values() if entry.stateful_filters()]
        return {
            name: {key: when.state_dict(origin) for key, when in self._entries[name].stateful_filters().items()}
            for name in names
        }

    def load_filter_states(self, origin: Progress, states: Mapping[str, Any]) -> None:
        """Give every handler's filter its saved state; one without begins where the run began."""
        for entry in self._entries.values():
            for key, when in entry.stateful_filters().items():
                when.load_state_dict(origin, states.get(entry.name, {}).get(key, {}))

    def ranks_of(self, owner: str) -> str:
        """Return on which ranks the handlers of this owner run."""
        entry = self._entries.get(owner) if isinstance(owner, PluginName) else None
        return "all" if entry is None else entry.ranks

    def open(self, run: Run) -> None:
        """At a run's start: silence what belongs to other ranks; what errors had switched off has a clean slate.

        Raises:
            RuntimeError: a run of this trainer goes on already.
        """
        if self._run is not None:
            raise RuntimeError(
                "This trainer is in a run, to which its plugins belong until it ends: use another Trainer with an "
                "engine of its own."
            )
        self._engine = run.engine
        for entry in self._entries.values():
            before, entry.here = entry.here, self._is_here(entry)
            if entry.given_up or entry.here != before:
                self._toggle(entry, enabled=entry.enabled or entry.given_up)
            entry.given_up = False
            entry.errors.clear()
        self._run = run  # from here on, changes are told

    def close(self) -> Iterator[tuple[str, BaseException]]:
        """At a run's end: close every plugin, those too that left while it went on; yield each error with its name."""
        self.free()
        closing: list[tuple[str, Callable[[], None]]] = list(self._bus.deferred)
        closing += [(entry.name, partial(_close, entry)) for entry in self._entries.values()]
        self._bus.deferred.clear()
        for name, close in closing:
            try:
                close()
            except BaseException as error:  # the others must be closed too; the caller raises it
                if self._bus.is_second_interrupt(error):
                    raise
                yield name, error

    def free(self) -> None:
        """Let another run begin."""
        self._run = None

    def _is_here(self, entry: Entry) -> bool:
        engine = self._engine
        is_main, is_local_main = (True, True) if engine is None else (engine.is_main, engine.is_local_main)
        return {"all": True, "main": is_main, "local_main": is_local_main}[entry.ranks]

    def _stateful(self) -> dict[str, Any]:
        return {name: entry.plugin for name, entry in self._entries.items() if hasattr(entry.plugin, "state_dict")}

    def _check(self, entry: Entry) -> None:
        kind = type(entry.plugin).__name__
        if any(other.plugin is entry.plugin for other in self._entries.values()):
            raise ValueError(f"This {kind} is registered already.")
        if entry.name in self._entries:
            mend = f"{kind}(...).named('{entry.name}_2')"
            raise ValueError(f"A plugin named {entry.name!r} is registered: give this one another name, as in {mend}.")
        for other in self._entries.values():
            if both := set(entry.declared("exclusive")) & set(other.declared("exclusive")):
                names = f"{other.name!r} and {entry.name!r} both claim {', '.join(sorted(both))}"
                raise ValueError(f"Plugins {names}, which only one may: unregister one of them.")
        if (policy := getattr(entry.plugin, "policy", "critical")) not in ("critical", "observer"):
            raise ValueError(f"Plugin {entry.name!r} has policy {policy!r}: it is 'critical' or 'observer'.")
        if entry.ranks not in ("all", "main", "local_main"):
            raise ValueError(
                f"Plugin {entry.name!r} has ranks {entry.ranks!r}: they are 'all', 'main' or 'local_main'."
            )
        if _overrides(entry.plugin, "state_dict") != _overrides(entry.plugin, "load_state_dict"):
            raise TypeError(f"{kind} has one of state_dict and load_state_dict: a plugin needs both or neither.")

    def _place(self, order: Mapping[type[Event], list[Handler]]) -> None:
        for event, handlers in order.items():
            for place, handler in enumerate(handlers):
                self._bus.signal(event).change(handler.method, order=(handler.mark.lane, place))

    def _toggle(self, entry: Entry, *, enabled: bool, by: str | None = None) -> None:
        before, entry.enabled = entry.enabled, enabled
        for event, handler in entry.handlers:
            self._bus.signal(event).change(handler.method, paused=not (enabled and entry.here))
        if enabled != before:
            self._tell(entry.name, "enabled" if enabled else "disabled", by)

    def _tell(
        self,
        name: str,
        change: Literal["registered", "unregistered", "enabled", "disabled"],
        by: str | None = None,
    ) -> None:
        if self._run is not None:
            self._run.emit(PluginChanged(name, change, by or current_owner() or "the caller"))

    def _retire(self, entry: Entry) -> None:
        """Close a plugin, as soon as no dispatch goes on that may still call it."""
        self._bus.deferred.append((entry.name, partial(_close, entry)))
        self._bus.settle()

    def _forgive(self, owner: str, run: Run, event: Event, error: BaseException) -> bool:
        """Log and count an observer's error; switch it off after `max_errors`."""
        entry = self._entries.get(owner) if isinstance(owner, PluginName) else None
        if entry is None or not isinstance(error, Exception) or getattr(entry.plugin, "policy", "") != "observer":
            return False
        entry.errors.append(f"{event.name} at step {run.progress.steps}: {type(error).__name__}: {error}")
        logger.error("plugin %r failed in %s", owner, event.name, exc_info=error)
        if event.name != PluginFailed.name:  # which would not end
            run.emit(PluginFailed(entry.name, event.name, error))
        if len(entry.errors) >= getattr(entry.plugin, "max_errors", 3) and entry.enabled:
            run.note(f"plugin {str(owner)!r} was switched off after {len(entry.errors)} errors")
            logger.error("plugin %r is switched off after %d errors", owner, len(entry.errors))
            entry.given_up = True
            self._toggle(entry, enabled=False, by=f"{len(entry.errors)} errors")
            self._retire(entry)
        return True

    def _matches(self, key: Key) -> list[Entry]:
        entries = self._entries.values()
        if isinstance(key, str):
            return [entry for entry in entries if entry.name == key]
        return [
            each for each in entries if (isinstance(each.plugin, key) if isinstance(key, type) else each.plugin is key)
        ]

    def _find(self, key: Key) -> Entry:
        matches = self._matches(key)
        if len(matches) == 1:
            return matches[0]
        given = key if isinstance(key, str) else key.__name__ if isinstance(key, type) else type(key).__name__
        if matches:
            names = ", ".join(entry.name for entry in matches)
            raise LookupError(f"Several plugins are of class {given}: choose by name, one of {names}.")
        raise LookupError(f"No plugin {given!r} is registered.{known_names(given, self._entries)}")


def _close(entry: Entry) -> None:
    """Close a plugin; an observer's error is logged and listed like all of its errors."""
    try:
        if isinstance(entry.plugin, Plugin):
            entry.plugin.close()
    except Exception as error:
        if entry.plugin.policy != "observer":
            raise
        entry.errors.append(f"close: {type(error).__name__}: {error}")
        logger.error("plugin %r failed to close", entry.name, exc_info=error)


def _overrides(plugin: object, method: str) -> bool:
    """Return whether a plugin has a method of its own, not the base class's empty one."""
    return getattr(type(plugin), method, None) not in (None, getattr(Plugin, method))


def _handlers_of(plugin: object, name: str) -> Iterator[tuple[type[Event], Handler]]:
    if isinstance(plugin, type):
        raise TypeError(f"{plugin.__name__} is a class: register an object of it, {plugin.__name__}(...).")
    if not (marks := list(marked_methods(type(plugin)))):
        form = "an object with methods marked @on, as in\n    @on(EpochEnd)\n    def report(self, run, event): ..."
        raise TypeError(f"{plugin!r} is no plugin: register {form}")
    for method_name, mark in marks:
        method: Callable[..., Any] = getattr(plugin, method_name)
        for event in mark.events:
            check_receiver(method, event)
            if event not in getattr(plugin, "ignores", ()):
                yield event, Handler(name, method, mark)


def _resolved(entries: Iterable[Entry]) -> dict[type[Event], list[Handler]]:
    by_event: dict[type[Event], list[Handler]] = {}
    for event, handler in [each for entry in entries for each in entry.handlers]:
        by_event.setdefault(event, []).append(handler)
    return {event: resolve(handlers, event.__name__) for event, handlers in by_event.items()}
