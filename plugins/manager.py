"""The trainer's plugins: register, order, look up, toggle, keep their state."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload
from weakref import WeakSet

from ..events import Bus, Event, Lane, PluginChanged, Progress, SavePoint
from ..events.bus import PluginName, current_owner
from ..events.checks import known_names

if TYPE_CHECKING:
    from ..events import Engine, Run
    from .discovery import Discovered
    from .entry import ObserverErrors, PluginEntry
    from .order import HandlerOrder
    from .states import Check, States

T = TypeVar("T")
Key = str | type | object
Change = Literal["registered", "unregistered", "enabled", "disabled"]
_IN_RUNS: WeakSet[Plugins] = WeakSet()  # those of trainers that are in a run


class Plugins:
    """All plugins of one trainer. Every change is legal at any moment and takes effect from the next event."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._entries: dict[str, PluginEntry] = {}
        self._by_object: dict[int, PluginEntry] = {}
        self._claims: dict[str, str] = {}  # exclusive words, and the names of those that claim them
        self._left_out: set[str] = set()  # the names of those that the environment kept from being loaded
        self._run: Run | None = None  # the one that has begun and not ended
        self._engine: Engine | None = None
        bus.forgiver = self._forgive

    def __repr__(self) -> str:
        names = [name if entry.enabled else f"{name} (off)" for name, entry in self._entries.items()]
        return f"<Plugins: {', '.join(names) or 'none'}>"

    @cached_property
    def _order(self) -> HandlerOrder:
        from .order import HandlerOrder

        return HandlerOrder(self._bus)

    @cached_property
    def _errors(self) -> ObserverErrors:
        from .entry import ObserverErrors

        return ObserverErrors(self._disable_by_errors)

    @cached_property
    def _states(self) -> States:
        from .states import States

        return States(self._entries, self._forgive_state)

    def register(self, plugin: T, *, name: str | None = None) -> T:
        """Subscribe the `@on` methods of an object. A failed registration changes nothing.

        Args:
            plugin: any object with `@on` methods.
            name: its name here; by default its `name` attribute, else its class name in snake case.

        Returns:
            The plugin.

        Raises:
            TypeError: not a plugin, or a handler whose signature or annotation does not fit its event.
            ValueError: a name or an exclusive capability is taken, or the order has a cycle.
            RuntimeError: this trainer is in a run, and the plugin is in one of another trainer.
        """
        from .discovery import say_switched_off, switched_off
        from .entry import make_entry

        entry = make_entry(plugin, name)
        claims = dict.fromkeys(entry.declared("exclusive"), entry.name)
        replaced, brought = entry.check_is_free(self._entries, self._claims, claims)
        if self._run is not None:
            entry.check_is_in_no_run(_in_runs())
        entry.enabled, entry.runs_on_this_rank = not switched_off(entry.name), self._runs_on_this_rank(entry)
        if not entry.enabled:
            say_switched_off(entry.name)
        for other in replaced:
            self.unregister(other)
        self._order.add(entry.handlers)
        self._entries[entry.name] = self._by_object[id(plugin)] = entry
        self._left_out.discard(entry.name)
        self._claims |= claims
        for (event, handler), when in zip(entry.handlers, entry.filters, strict=True):
            subscription = entry.subscription(event, handler, when)
            self._bus.signal(event).connect(handler.method, weak=False, subscription=subscription)
        self._emit_change(entry.name, "registered")
        for kind in brought:
            self._by_object[id(self.register(kind()))].is_brought = True
        return plugin

    def unregister(self, key: Key) -> Any:
        """Disconnect and close a plugin, given by name, class or object; return it."""
        if self._is_left_out(key):
            self._left_out -= {key}
            return None
        entry = self._find(key)
        del self._entries[entry.name], self._by_object[id(entry.plugin)]
        self._claims = {word: name for word, name in self._claims.items() if name != entry.name}
        for event, handler in entry.handlers:
            self._bus.signal(event).disconnect(handler.method)
            self._order.remove(event, handler)
        self._retire(entry)
        self._emit_change(entry.name, "unregistered")
        for name in entry.brought_alone(self._entries.values()):
            self.unregister(name)
        return entry.plugin

    def load(self, name: str, /, **options: Any) -> Any:
        """Import an installed plugin by its entry-point name, make it with `options` and register it.

        Returns:
            The plugin; None, with a warning, where the environment disables it. It is not imported then; `disable`,
            `enable` and `unregister` take its name, or the None, and do nothing.

        Raises:
            LookupError: no installed plugin has this name.
            ImportError: it cannot be imported.
            TypeError: it has no such option, or needs another one.
        """
        from .discovery import check_options, find, say_switched_off

        found = find(name)
        if found.switched_off:
            say_switched_off(found.name)
            self._left_out.add(found.name)
            return None
        made_by = found.load()
        check_options(name, made_by, options, lambda option: f"plugins.load({name!r}, {option})")
        return self.register(made_by(**options))

    def load_added(self) -> None:
        """Load the plugins that the environment adds, as `HELIOGRAPH_PLUGINS=+handler_times` does."""
        if os.environ.get("HELIOGRAPH_PLUGINS"):
            from .discovery import load_added

            load_added(self.names(), self.load)

    @staticmethod
    def available() -> list[Discovered]:
        """Return the installed plugins, from metadata only."""
        from .discovery import discover

        return discover()

    def enable(self, *keys: Key, by: str | None = None) -> None:
        """Call the handlers of plugins again, each in its former position; `by` is who did it."""
        from .discovery import say_stays_off, switched_off

        for entry in self._find_all(keys):
            if switched_off(entry.name):
                say_stays_off(entry.name)
            else:
                self._toggle(entry, enabled=True, by=by)
        for name in self._left_out.intersection(key for key in keys if isinstance(key, str)):
            say_stays_off(name)

    def disable(self, *keys: Key, by: str | None = None) -> None:
        """Stop calling the handlers of plugins, which keep their position and their state; `by` is who did it."""
        for entry in self._find_all(keys):
            self._toggle(entry, enabled=False, by=by)
            self._retire(entry)

    @contextmanager
    def disabled(self, *keys: Key) -> Iterator[None]:
        """Disable plugins within this context; those that were disabled before stay so."""
        entries = [entry for entry in self._find_all(keys) if entry.enabled]
        self.disable(*(entry.name for entry in entries))
        try:
            yield
        finally:
            self.enable(*(entry.name for entry in entries if self._entries.get(entry.name) is entry))

    def is_enabled(self, key: Key) -> bool:
        """Return whether a plugin is enabled."""
        return not self._is_left_out(key) and self._find(key).enabled

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

    def declared(self, attribute: str, *, enabled: bool = True) -> dict[str, str]:
        """Return, for each word of a declaration such as `asks`, the name of an enabled plugin that declares it.

        Args:
            attribute: the declaration.
            enabled: False for that of a disabled plugin.
        """
        entries = [entry for entry in self._entries.values() if entry.enabled == enabled]
        return {word: entry.name for entry in entries for word in entry.declared(attribute)}

    def runs_apart(self, owner: str) -> bool:
        """Return whether the handlers of this owner must not disturb the training's random stream."""
        entry = self._entry_of(owner)
        return entry is not None and entry.is_observer and bool(getattr(entry.plugin, "draws", True))

    def redirect(self, folder: Path) -> dict[str, list[Path]]:
        """Let every plugin write to a folder of its own in `folder`; return by name where each would have written."""
        found = {}
        for name, entry in self._entries.items():
            if entry.enabled and entry.has_lifecycle:
                found[name] = [Path(each) for each in entry.plugin.rehearse(folder / name)]
        return {name: paths for name, paths in found.items() if paths}

    def unredirected(self) -> list[str]:
        """Return the names of the user's plugins that `redirect` cannot redirect, if they write at all."""
        return [name for name, entry in self._entries.items() if entry.is_unredirected]

    def errors(self) -> dict[str, tuple[str, ...]]:
        """Return the forgiven errors of the observers."""
        return {entry.name: tuple(entry.errors) for entry in self._entries.values() if entry.errors}

    def descriptions(self, run: Run) -> dict[str, str]:
        """Return what each active plugin says that it will do in a run, by its name, where it says something."""
        from .states import descriptions

        return descriptions(self._entries.values(), run, self._forgive_state)

    def writes_saves(self, *, without: str = "") -> bool:
        """Return whether anybody but the plugin `without` writes at a save, to judge by who handles `SavePoint`."""
        return any(entry is None or (entry.enabled and entry.name != without) for entry in self._writers())

    def disabled_writers(self) -> dict[str, int | None]:
        """Return the disabled plugins that would write at a save, and at which step of the run each was disabled."""
        return {entry.name: entry.disabled_at for entry in self._writers() if entry is not None and not entry.enabled}

    def _writers(self) -> Iterator[PluginEntry | None]:
        """Return whoever handles `SavePoint` between `MEASURE` and `REPORT`; None for what is not a plugin."""
        handlers = self._bus.signal(SavePoint).subscriptions.values()
        return (self._entry_of(each.owner) for each in handlers if Lane.MEASURE < each.position[0] < Lane.REPORT)

    def uncalled(self, emitted: Container[type[Event]], note: Callable[[str], None]) -> list[str]:
        """Return a sentence for each handler that a training did not call, though it is not optional.

        Args:
            emitted: the events of the training.
            note: called with a line for each plugin whose condition never held, though nobody said that it would.
        """
        if not self._entries:
            return []
        from .states import uncalled

        return list(uncalled(self._entries.values(), emitted, note))

    def state_dict(self, check: Check | None = None) -> dict[str, Any]:
        """Return a copy of every plugin's state by name; an observer's that cannot be read or saved is left out.

        Args:
            check: raises TypeError where a state, given with its name, cannot be saved; asked of observers only.
        """
        return self._states.save(check)

    def state_versions(self) -> dict[str, int]:
        """Return the versions of the states by name, but for those of version 1."""
        return self._states.versions()

    def load_state_dict(
        self,
        states: Mapping[str, Any],
        versions: Mapping[str, int] | None = None,
        path: Path | None = None,
        *,
        goes_back: bool = False,
    ) -> tuple[list[str], list[str]]:
        """Give every plugin its saved state, migrated if needed; an observer that cannot take it starts fresh.

        Args:
            states: by the plugins' names. An empty one is of a plugin that had nothing to remember, or, at a resume, of
                a version of it that had no state; None means the same as a missing name.
            versions: of the states, where they are not 1.
            path: where the states were read from, for errors.
            goes_back: whether this is a return within a run: plugins that had an empty state there are given it.

        Returns:
            The names of plugins that have state but found none, and the names of states that no plugin claimed.

        Raises:
            ValueError: a plugin cannot continue from its state; says which, what it raised, and what to do.
        """
        return self._states.load(states, versions or {}, path, goes_back=goes_back)

    def filter_states(self, origin: Progress, check: Check | None = None) -> dict[str, Any]:
        """Return the state of every handler's filter, by the plugin's name and `<method>/<event>`."""
        return self._states.save_filters(origin, check)

    def load_filter_states(self, origin: Progress, states: Mapping[str, Any]) -> None:
        """Give every handler's filter its saved state; one without begins where the run began."""
        self._states.load_filters(origin, states)

    def ranks_of(self, owner: str) -> str:
        """Return on which ranks the handlers of this owner run."""
        entry = self._entry_of(owner)
        return "all" if entry is None else entry.ranks

    def open(self, run: Run) -> None:
        """At a run's start: pause what belongs to other ranks, and enable again what errors had disabled.

        Raises:
            RuntimeError: a run of this trainer has not ended, or one of another trainer that has a plugin of this one.
        """
        self.check_free()
        if os.environ.get("HELIOGRAPH_PLUGINS"):
            from .discovery import changes

            run.note(changes({*self._entries, *self._left_out}, [each.name for each in self.available()]))
        self._engine = run.engine
        for entry in self._entries.values():
            entry.check_condition()
            before, entry.runs_on_this_rank = entry.runs_on_this_rank, self._runs_on_this_rank(entry)
            if entry.disabled_by_errors or entry.runs_on_this_rank != before:
                self._toggle(entry, enabled=entry.enabled or entry.disabled_by_errors)
            entry.forget_run()
        self._run = run  # from here on, changes are emitted
        _IN_RUNS.add(self)

    def check_free(self) -> None:
        """Raise RuntimeError unless a run may begin: a plugin belongs to one run at a time."""
        if self._run is not None:
            raise RuntimeError(
                "This trainer is in a run, to which its plugins belong until it ends: use another Trainer with an "
                "engine of its own."
            )
        for entry in self._entries.values():
            entry.check_is_in_no_run(_in_runs())

    def reset(self) -> None:
        """Before a training: reset every plugin that takes part."""
        for entry in self._entries.values():
            entry.reset_filters()
            if not (entry.is_active and entry.has_lifecycle):
                continue
            try:
                entry.plugin.reset()
            except BaseException as error:
                if not self._forgive_state(entry, "reset", "it may remember a former training", error):
                    error.add_note(f"heliograph: in {entry.name}, which was to be reset before TrainStart")
                    raise

    def close(self) -> Iterator[tuple[str, BaseException]]:
        """At a run's end: close every plugin, also those unregistered during it; yield each error with its name."""
        self.free()
        closing: list[tuple[str, Callable[[], None]]] = list(self._bus.deferred)
        closing += [(entry.name, partial(self._errors.close, entry)) for entry in self._entries.values()]
        self._bus.deferred.clear()
        for name, close in closing:
            try:
                close()
            except BaseException as error:  # the others must be closed too; the caller raises it
                if self._bus.is_second_interrupt(error):
                    raise
                yield name, error

    def free(self) -> None:
        """Allow another run to begin."""
        self._run = None
        _IN_RUNS.discard(self)

    def _runs_on_this_rank(self, entry: PluginEntry) -> bool:
        engine = self._engine
        is_main, is_local_main = (True, True) if engine is None else (engine.is_main, engine.is_local_main)
        return {"all": True, "main": is_main, "local_main": is_local_main}[entry.ranks]

    def _toggle(self, entry: PluginEntry, *, enabled: bool, by: str | None = None) -> None:
        before = entry.toggle(enabled=enabled, run=self._run)
        if self._run is not None and not entry.disabled_by_errors:
            self._run.control.switches[entry.name] = enabled  # a checkpoint holds it
        for event, handler in entry.handlers:
            self._bus.signal(event).pause(handler.method, paused=not entry.is_active)
        if enabled != before:
            self._emit_change(entry.name, "enabled" if enabled else "disabled", by)

    def _emit_change(self, name: str, change: Change, by: str | None = None) -> None:
        if self._run is not None:
            self._run.emit(PluginChanged(name, change, by or current_owner() or "the caller"))

    def _retire(self, entry: PluginEntry) -> None:
        """Close a plugin, as soon as no emission that may still call it is running."""
        self._bus.deferred.append((entry.name, partial(self._errors.close, entry)))
        self._bus.run_deferred()

    def _forgive(self, owner: str, run: Run, event: Event, error: BaseException) -> bool:
        """Return whether a run continues in spite of a handler's error: if it is an observer's."""
        entry = self._entry_of(owner)
        return entry is not None and self._errors.forgive_handler(entry, run, event, error)

    def _forgive_state(self, entry: PluginEntry, what: str, consequence: str, error: BaseException) -> bool:
        return self._errors.forgive_state(entry, self._run, what, consequence, error)

    def _disable_by_errors(self, entry: PluginEntry) -> None:
        entry.disabled_by_errors = True
        self._toggle(entry, enabled=False, by=f"{len(entry.errors)} errors")
        self._retire(entry)

    def _entry_of(self, owner: str) -> PluginEntry | None:
        """Return the plugin that an owner of handlers is; None for a function."""
        return self._entries.get(owner) if isinstance(owner, PluginName) else None

    def _matches(self, key: Key) -> list[PluginEntry]:
        if isinstance(key, type):
            return [entry for entry in self._entries.values() if isinstance(entry.plugin, key)]
        entry = self._entries.get(key) if isinstance(key, str) else self._by_object.get(id(key))
        return [] if entry is None else [entry]

    def _is_left_out(self, key: Key) -> bool:
        """Return whether a key is the name of a plugin that was not loaded, or the None in its place."""
        return bool(self._left_out) and (key is None or (isinstance(key, str) and key in self._left_out))

    def _find_all(self, keys: Iterable[Key]) -> list[PluginEntry]:
        """Return the plugins of these keys, but for those that the environment kept from being loaded."""
        return [self._find(key) for key in keys if not self._is_left_out(key)]

    def _find(self, key: Key) -> PluginEntry:
        matches = self._matches(key)
        if len(matches) == 1:
            return matches[0]
        given = key if isinstance(key, str) else key.__name__ if isinstance(key, type) else type(key).__name__
        if matches:
            names = ", ".join(entry.name for entry in matches)
            raise LookupError(f"Several plugins are of class {given}: choose by name, one of {names}.")
        from .discovery import not_loaded

        known = known_names(given, self._entries)
        raise LookupError(f"No plugin {given!r} is registered.{known}{not_loaded(self._left_out)}")


def _in_runs() -> list[tuple[dict[int, PluginEntry], Run | None]]:
    return [(each._by_object, each._run) for each in list(_IN_RUNS)]
