"""The trainer's plugins: register, order, look up, toggle, save and load their state."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload
from weakref import WeakSet

from ..events import Bus, Event, Lane, PluginChanged, PluginName, Progress, SavePoint, current_owner
from ..events.checks import known_names

if TYPE_CHECKING:
    from ..events import Engine, Run
    from .discovery import Discovered
    from .entry import HandlerOrder, PluginEntry
    from .states import Check, States

T = TypeVar("T")
Key = str | type | object
Change = Literal["registered", "unregistered", "enabled", "disabled"]
logger = logging.getLogger("heliograph")
_IN_RUNS: WeakSet[Plugins] = WeakSet()  # of the trainers that are in a run


class Plugins:
    """The plugins of a trainer.

    Every change is allowed at any time and takes effect from the next event on.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._entries: dict[str, PluginEntry] = {}
        self._by_object: dict[int, PluginEntry] = {}
        self._claims: dict[str, str] = {}  # exclusive capabilities, and the name of the plugin that claims each
        self._run: Run | None = None  # from its start to its end
        self._engine: Engine | None = None
        bus.forgiver = self._forgive

    def __repr__(self) -> str:
        names = [name if entry.enabled else f"{name} (off)" for name, entry in self._entries.items()]
        return f"<Plugins: {', '.join(names) or 'none'}>"

    @cached_property
    def _order(self) -> HandlerOrder:
        from .entry import HandlerOrder

        return HandlerOrder(self._bus)

    @cached_property
    def _states(self) -> States:
        from .states import States

        return States(self._entries, self._forgive_state)

    def register(self, plugin: T, *, name: str | None = None) -> T:
        """Subscribe the `@on` methods of an object. A failed registration changes nothing.

        Args:
            plugin: any object with `@on` methods.
            name: the name to register it under; by default its `name` attribute, else its class name in snake case.

        Returns:
            The plugin.

        Raises:
            TypeError: the object is not a plugin, or the signature or annotation of a handler does not fit its event.
            ValueError: the name or an exclusive capability is taken, or the order of handlers has a cycle.
            RuntimeError: this trainer is in a run, and the plugin takes part in a run of another trainer.
        """
        from .entry import make_entry

        entry = make_entry(plugin, name)
        claims = dict.fromkeys(entry.declared("exclusive"), entry.name)
        replaced, brought = entry.check_is_free(self._entries, self._claims, claims)
        if self._run is not None:
            self._check_is_in_no_run(entry)
        entry.runs_on_this_rank = self._runs_on_this_rank(entry)
        if os.environ.get("HELIOGRAPH_PLUGINS"):
            from .discovery import SwitchedOff, is_switched_off

            if is_switched_off(plugin, entry.name):
                entry.enabled = False
                level = 3 if isinstance(plugin, SwitchedOff) else 2  # of the caller of `load` or `register`
                text = f"Plugin {entry.name!r} is disabled by HELIOGRAPH_PLUGINS."
                warnings.warn(text, RuntimeWarning, stacklevel=level)
        for replaced_name in replaced:
            self.unregister(replaced_name)
        self._order.add(entry.handlers)
        self._entries[entry.name] = self._by_object[id(plugin)] = entry
        self._claims |= claims
        for event, handler in entry.handlers:
            subscription = entry.subscription(event, handler)
            self._bus.signal(event).connect(handler.method, weak=False, subscription=subscription)
        self._emit_change(entry.name, "registered")
        for kind in brought:
            self._by_object[id(self.register(kind()))].is_brought = True
        return plugin

    def unregister(self, key: Key) -> Any:
        """Disconnect, close and return a plugin, selected by name, class or object."""
        entry = self._find(key)
        del self._entries[entry.name], self._by_object[id(entry.plugin)]
        self._claims = {word: name for word, name in self._claims.items() if name != entry.name}
        for event, handler in entry.handlers:
            self._bus.signal(event).disconnect(handler.method)
            self._order.remove(event, handler)
        self._retire(entry)
        self._emit_change(entry.name, "unregistered")
        for name in entry.brought_only_by_this(self._entries.values()):
            self.unregister(name)
        return entry.plugin

    def load(self, name: str, /, **options: Any) -> Any:
        """Create an installed plugin by its entry-point name and register it.

        Args:
            name: the entry-point name.
            **options: the arguments of its constructor.

        Returns:
            The plugin. If the environment disables it, it is not imported; a disabled stand-in is registered and
            returned, with a warning.

        Raises:
            LookupError: no installed plugin has this name.
            ImportError: the import fails.
            TypeError: an option is unknown, or a required one is missing.
        """
        from .discovery import SwitchedOff, check_options, find

        installed = find(name)
        if installed.switched_off:
            return self.register(SwitchedOff(installed.name))
        made_by = installed.load()
        check_options(name, made_by, options, lambda option: f"plugins.load({name!r}, {option})")
        return self.register(made_by(**options))

    def load_added(self) -> None:
        """Load the plugins that `HELIOGRAPH_PLUGINS` adds, such as `+handler_times`."""
        if os.environ.get("HELIOGRAPH_PLUGINS"):
            from .discovery import load_added

            load_added(self.names(), self.load)

    @staticmethod
    def available() -> list[Discovered]:
        """Return the installed plugins, without importing them."""
        from .discovery import discover

        return discover()

    def enable(self, *keys: Key, by: str | None = None) -> None:
        """Enable plugins: their handlers are called again, in the same positions.

        `by` names who enables them; by default the plugin whose handler calls.
        """
        from .discovery import is_switched_off

        for entry in list(map(self._find, keys)):
            if is_switched_off(entry.plugin, entry.name):
                text = f"Plugin {entry.name!r} stays disabled because of HELIOGRAPH_PLUGINS."
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            else:
                self._toggle(entry, enabled=True, by=by)

    def disable(self, *keys: Key, by: str | None = None) -> None:
        """Disable plugins: their handlers are not called, but keep position and state.

        `by` names who disables them; by default the plugin whose handler calls.
        """
        for entry in list(map(self._find, keys)):
            self._toggle(entry, enabled=False, by=by)
            self._retire(entry)

    @contextmanager
    def disabled(self, *keys: Key) -> Iterator[None]:
        """Disable plugins within a `with` block, except those disabled before."""
        entries = [entry for entry in map(self._find, keys) if entry.enabled]
        self.disable(*(entry.name for entry in entries))
        try:
            yield
        finally:
            self.enable(*(entry.name for entry in entries if self._entries.get(entry.name) is entry))

    def is_enabled(self, key: Key) -> bool:
        """Return whether a plugin is enabled."""
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
        """Return the names of the plugins in the order of registration."""
        return list(self._entries)

    def declared(self, attribute: str, *, enabled: bool = True) -> dict[str, str]:
        """Map each word of a declaration such as `asks` to a plugin that declares it.

        Args:
            attribute: the name of the declaration.
            enabled: False considers disabled plugins instead of enabled ones.
        """
        entries = [entry for entry in self._entries.values() if entry.enabled == enabled]
        return {word: entry.name for entry in entries for word in entry.declared(attribute)}

    def runs_apart(self, owner: str) -> bool:
        """True if handlers of this owner must not advance the training's generators."""
        entry = self._entry_of(owner)
        return entry is not None and entry.is_observer and bool(getattr(entry.plugin, "draws", True))

    def redirect(self, folder: Path) -> dict[str, list[Path]]:
        """Redirect the files of every plugin to a folder of its own within `folder`.

        Returns:
            The usual paths of each plugin, by name.
        """
        redirected = {}
        for name, entry in self._entries.items():
            if entry.enabled and entry.has_lifecycle:
                redirected[name] = [Path(path) for path in entry.plugin.rehearse(folder / name)]
        return {name: paths for name, paths in redirected.items() if paths}

    def unredirected(self) -> list[str]:
        """Return the names of the user's plugins that `redirect` cannot redirect."""
        return [name for name, entry in self._entries.items() if entry.is_unredirected]

    def errors(self) -> dict[str, tuple[str, ...]]:
        """Return the forgiven errors of the observers, by name."""
        return {entry.name: tuple(entry.errors) for entry in self._entries.values() if entry.errors}

    def descriptions(self, run: Run) -> dict[str, str]:
        """Return the descriptions of the active plugins for a run, by name."""
        from .states import descriptions

        return descriptions(self._entries.values(), run, self._forgive_state)

    def writes_saves(self, *, without: str = "") -> bool:
        """True if a plugin other than `without`, or a function, writes at a `SavePoint`."""
        return any(entry is None or (entry.enabled and entry.name != without) for entry in self._writers())

    def disabled_writers(self) -> dict[str, int | None]:
        """Return the disabled plugins that would write at a save.

        Returns:
            For each name, the step of the run at which the plugin was disabled, or None.
        """
        return {entry.name: entry.disabled_at for entry in self._writers() if entry is not None and not entry.enabled}

    def _writers(self) -> Iterator[PluginEntry | None]:
        """Yield who handles `SavePoint` from `DECIDE` to `PERSIST`; None for functions."""
        handlers = self._bus.signal(SavePoint).subscriptions.values()
        writers = (handler for handler in handlers if Lane.MEASURE < handler.position[0] < Lane.REPORT)
        return (self._entry_of(writer.owner) for writer in writers)

    def uncalled(self, emitted: Container[type[Event]], note: Callable[[str], None]) -> list[str]:
        """Return a sentence for each required handler that a training did not call.

        Args:
            emitted: the events of the training.
            note: called with a line for each plugin whose condition never held and was not expected to.
        """
        if not self._entries:
            return []
        from .states import uncalled

        return list(uncalled(self._entries.values(), emitted, note))

    def state_dict(self, check: Check | None = None) -> dict[str, Any]:
        """Return a copy of every plugin's state, by name.

        The state of an observer is omitted if it cannot be read or saved.

        Args:
            check: called with an observer's state and a name for it; raises TypeError if it cannot be saved.
        """
        return self._states.save(check)

    def state_versions(self) -> dict[str, int]:
        """Return the state versions other than 1, by name."""
        return self._states.versions()

    def load_state_dict(
        self,
        states: Mapping[str, Any],
        versions: Mapping[str, int] | None = None,
        path: Path | None = None,
        *,
        goes_back: bool = False,
    ) -> tuple[list[str], list[str]]:
        """Restore the state of every plugin, and migrate it if necessary.

        An observer that cannot load its state starts fresh.

        Args:
            states: the states, by name. An empty state means that the plugin had none at that time; None is the same as
                a missing name.
            versions: the versions of the states, if not 1.
            path: the file of the states, for errors.
            goes_back: whether the run rolls back. Then an empty state is passed to its plugin, too.

        Returns:
            The names of plugins without a saved state, and the names of states without a plugin.

        Raises:
            ValueError: a plugin cannot load its state; the message says why and how to fix it.
        """
        from .state_loader import StateLoader  # imported at a resume

        return StateLoader(self._states).load(states, versions or {}, path, goes_back=goes_back)

    def filter_states(self, origin: Progress, check: Check | None = None) -> dict[str, Any]:
        """Return the state of every handler's filter, by plugin and `<method>/<event>`."""
        return self._states.save_filters(origin, check)

    def load_filter_states(self, origin: Progress, states: Mapping[str, Any]) -> None:
        """Restore the state of every handler's filter.

        A filter without a saved state counts from the start of the run.
        """
        from .state_loader import StateLoader  # imported at a resume

        StateLoader(self._states).load_filters(origin, states)

    def ranks_of(self, owner: str) -> str:
        """Return on which ranks the handlers of this owner run."""
        entry = self._entry_of(owner)
        return "all" if entry is None else entry.ranks

    def open(self, run: Run) -> None:
        """Begin a run: pause handlers of other ranks, enable plugins disabled by errors.

        Raises:
            RuntimeError: this trainer is already in a run, or a plugin takes part in a run of another trainer.
        """
        self.check_free()
        if os.environ.get("HELIOGRAPH_PLUGINS"):
            from .discovery import changes

            run.note(changes(self._entries, [plugin.name for plugin in self.available()]))
        self._engine = run.engine
        for entry in self._entries.values():
            entry.check_condition()
            before, entry.runs_on_this_rank = entry.runs_on_this_rank, self._runs_on_this_rank(entry)
            if entry.disabled_by_errors or entry.runs_on_this_rank != before:
                self._toggle(entry, enabled=entry.enabled or entry.disabled_by_errors)
            entry.begin_run()
        self._run = run  # from here on, changes are emitted
        _IN_RUNS.add(self)

    def check_free(self) -> None:
        """Raise RuntimeError if this trainer or one of its plugins is in a run."""
        if self._run is not None:
            raise RuntimeError("This trainer is already in a run: use another Trainer, or wait until the run ends.")
        for entry in self._entries.values():
            self._check_is_in_no_run(entry)

    @staticmethod
    def _check_is_in_no_run(entry: PluginEntry) -> None:
        for plugins in list(_IN_RUNS):
            if plugins._run is not None and id(entry.plugin) in plugins._by_object:
                name, kind = plugins._run.name, type(entry.plugin).__name__
                raise RuntimeError(f"Plugin {entry.name!r} is in run {name!r} of another trainer: use a new {kind}.")

    def reset(self) -> None:
        """Reset every plugin that takes part in the training that begins."""
        for entry in self._entries.values():
            entry.reset_filters()
            if not (entry.is_active and entry.has_lifecycle):
                continue
            try:
                entry.plugin.reset()
            except BaseException as error:
                if not self._forgive_state(entry, "reset", "its state may be from an earlier training", error):
                    error.add_note(f"heliograph: in reset of {entry.name}, before TrainStart")
                    raise

    def close(self) -> Iterator[tuple[str, BaseException]]:
        """End a run: close every plugin, and yield each error with the plugin's name.

        Plugins that were unregistered during the run are closed too.
        """
        self.free()
        closing: list[tuple[str, Callable[[], None]]] = list(self._bus.deferred)
        closing += [(entry.name, entry.close) for entry in self._entries.values()]
        self._bus.deferred.clear()
        for name, close in closing:
            try:
                close()
            except BaseException as error:  # the caller raises it after all plugins are closed
                if self._bus.is_second_interrupt(error):
                    raise
                yield name, error

    def free(self) -> None:
        """Allow the next run to begin."""
        self._run = None
        _IN_RUNS.discard(self)

    def _runs_on_this_rank(self, entry: PluginEntry) -> bool:
        engine = self._engine
        is_main, is_local_main = (True, True) if engine is None else (engine.is_main, engine.is_local_main)
        return {"all": True, "main": is_main, "local_main": is_local_main}[entry.ranks]

    def _toggle(self, entry: PluginEntry, *, enabled: bool, by: str | None = None) -> None:
        before = entry.toggle(enabled=enabled, run=self._run)
        if self._run is not None and not entry.disabled_by_errors:
            self._run.control.switches[entry.name] = enabled  # saved in checkpoints
        for event, handler in entry.handlers:
            self._bus.signal(event).pause(handler.method, paused=not entry.is_active)
        if enabled != before:
            self._emit_change(entry.name, "enabled" if enabled else "disabled", by)

    def _emit_change(self, name: str, change: Change, by: str | None = None) -> None:
        if self._run is not None:
            self._run.emit(PluginChanged(name, change, by or current_owner() or "the caller"))

    def _retire(self, entry: PluginEntry) -> None:
        # Deferred, because a running emission may still call the plugin.
        self._bus.deferred.append((entry.name, entry.close))
        self._bus.run_deferred()

    def _forgive(self, owner: str, run: Run, event: Event, error: BaseException) -> bool:
        entry = self._entry_of(owner)
        if entry is None or not entry.forgive_handler(run, event, error):
            return False
        if len(entry.errors) >= getattr(entry.plugin, "max_errors", 3) and entry.enabled:
            run.warn(f"Plugin {entry.name!r} was switched off after {len(entry.errors)} errors: {entry.errors[-1]}.")
            logger.error("plugin %r is switched off after %d errors", entry.name, len(entry.errors))
            entry.disabled_by_errors = True
            self._toggle(entry, enabled=False, by=f"{len(entry.errors)} errors")
            self._retire(entry)
        return True

    def _forgive_state(self, entry: PluginEntry, method: str, consequence: str, error: BaseException) -> bool:
        return entry.forgive_state(self._run, method, consequence, error)

    def _entry_of(self, owner: str) -> PluginEntry | None:
        return self._entries.get(owner) if isinstance(owner, PluginName) else None

    def _matches(self, key: Key) -> list[PluginEntry]:
        if isinstance(key, type):
            return [entry for entry in self._entries.values() if isinstance(entry.plugin, key)]
        entry = self._entries.get(key) if isinstance(key, str) else self._by_object.get(id(key))
        return [] if entry is None else [entry]

    def _find(self, key: Key) -> PluginEntry:
        matches = self._matches(key)
        if len(matches) == 1:
            return matches[0]
        name = key if isinstance(key, str) else key.__name__ if isinstance(key, type) else type(key).__name__
        if matches:
            names = ", ".join(entry.name for entry in matches)
            raise LookupError(f"Several plugins are of class {name}: choose by name, one of {names}.")
        raise LookupError(f"No plugin {name!r} is registered.{known_names(name, self._entries)}")
