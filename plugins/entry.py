"""A registered plugin: its name, its declarations, and its handlers with their order."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from inspect import isfunction, signature
from typing import TYPE_CHECKING, Any, get_args

from ..events import CATALOGUE, Bus, Event, PluginFailed, PluginName, Subscription, Verb
from ..events.bus import Position
from ..events.checks import check_whole_number, describe_error, is_interrupt, known_names
from ..events.signatures import check_receiver
from .filters import Filter
from .first_party import BRIDGES, is_first_party
from .plugin import Marker, Plugin, marked_methods, snake_case

if TYPE_CHECKING:
    from ..events import Run
    from .conditions import ConditionGate

logger = logging.getLogger("heliograph")


ASKED = frozenset(get_args(Verb)) | {"scheduler"}  # allowed in `asks`


@dataclass(slots=True, eq=False)
class Handler:
    """A bound method of a plugin with its mark.

    Attributes:
        plugin: the plugin's name.
        method: the method.
        mark: its mark.
        when: a copy of the mark's filter.
        place: its place among the handlers of the event.
    """

    plugin: str
    method: Callable[..., Any]
    mark: Marker[Any]
    when: Any
    place: int = 0

    @property
    def position(self) -> Position:
        return self.mark.lane, self.place


@dataclass(slots=True)
class PluginEntry:
    """A registered plugin and its status.

    Attributes:
        disabled_at: the step of the run at which it was disabled; None if it is enabled or was disabled before.
        is_brought: whether another plugin registered it by `brings`; registering one of its class replaces it.
    """

    name: str
    plugin: Any
    handlers: list[tuple[type[Event], Handler]]
    enabled: bool = True
    runs_on_this_rank: bool = True
    disabled_by_errors: bool = False
    disabled_at: int | None = None
    is_brought: bool = False
    errors: list[str] = field(default_factory=list)
    gate: ConditionGate | None = None

    @property
    def is_active(self) -> bool:
        """True if its handlers are called on this rank."""
        return self.enabled and self.runs_on_this_rank

    @property
    def ranks(self) -> str:
        return str(getattr(self.plugin, "ranks", "all"))

    @property
    def is_observer(self) -> bool:
        return getattr(self.plugin, "policy", "critical") == "observer"

    @property
    def has_lifecycle(self) -> bool:
        """True for a `Plugin`, which is reset and closed."""
        return isinstance(self.plugin, Plugin)

    @property
    def is_unredirected(self) -> bool:
        """True for a user's plugin without `rehearse`, which may write to its usual place."""
        plugin = self.plugin
        can_be_redirected = self.has_lifecycle and type(plugin).rehearse is not Plugin.rehearse
        if can_be_redirected or is_first_party(type(plugin).__module__) or not getattr(plugin, "rehearses", True):
            return False
        return hasattr(plugin, "__dict__")

    @property
    def state_version(self) -> int:
        return int(getattr(self.plugin, "state_version", 1))

    def toggle(self, *, enabled: bool, run: Run | None) -> bool:
        before, self.enabled = self.enabled, enabled
        if enabled != before:
            self.disabled_at = None if enabled or run is None else run.progress.steps
        return before

    def begin_run(self) -> None:
        self.disabled_by_errors, self.disabled_at = False, None
        self.errors.clear()

    def forgive_handler(self, run: Run, event: Event, error: BaseException) -> bool:
        """Log and record an error of a handler of an observer.

        Returns:
            True if the run continues: the plugin is an observer, and the error is not a Ctrl-C.
        """
        if not self._forgives(error):
            return False
        self._add(event.name, f"{event.name} at step {run.progress.steps}: {describe_error(error)}", error)
        if event.name != PluginFailed.name:  # no recursion
            run.emit(PluginFailed(self.name, event.name, error))
        return True

    def forgive_state(self, run: Run | None, method: str, consequence: str, error: BaseException) -> bool:
        """Log, record and note an error of another method of an observer, once.

        Args:
            run: the current run, if any.
            method: the method that failed.
            consequence: the consequence, for the note.
            error: the error.

        Returns:
            True if the run continues: the plugin is an observer, and the error is not a Ctrl-C.
        """
        if not self._forgives(error):
            return False
        line = f"{method}: {describe_error(error)}"
        if line not in self.errors:
            self._add(method, line, error)
            if run is not None:
                run.note(f"plugin {self.name!r}: {consequence}; {line}")
        return True

    def close(self) -> None:
        try:
            if self.has_lifecycle:
                self.plugin.close()
        except BaseException as error:
            if not self._forgives(error):
                raise
            self._add("close", f"close: {describe_error(error)}", error)

    def _forgives(self, error: BaseException) -> bool:
        return self.is_observer and not is_interrupt(error)

    def _add(self, method: str, line: str, error: BaseException) -> None:
        self.errors.append(line)
        # the text of an OSError, such as a full disk, says enough
        traceback = None if isinstance(error, OSError) else error
        logger.error("plugin %r failed in %s: %s", self.name, method, describe_error(error), exc_info=traceback)

    def reset_filters(self) -> None:
        for _, handler in self.handlers:
            if isinstance(handler.when, Filter):
                handler.when.passed = False
        if self.gate is not None:
            self.gate.reset()

    def check_condition(self) -> None:
        registered = None if self.gate is None else self.gate.condition
        if self.has_lifecycle and self.plugin.condition is not registered:
            raise RuntimeError(f"The condition of plugin {self.name!r} was changed too late: call when() earlier.")

    def check_is_free(
        self, entries: Mapping[str, PluginEntry], claims: Mapping[str, str], own_claims: Iterable[str]
    ) -> tuple[list[str], list[type]]:
        """Raise ValueError if the object, its name or a capability is already registered.

        Returns:
            The names of brought plugins that this one replaces, and the classes of which it brings one.
        """
        kind = type(self.plugin).__name__
        if any(entry.plugin is self.plugin for entry in entries.values()):
            raise ValueError(f"This {kind} is already registered.")
        brought = {name: entry.plugin for name, entry in entries.items() if entry.is_brought}
        replaced = [name for name, plugin in brought.items() if isinstance(self.plugin, type(plugin))]
        if self.name in entries and self.name not in replaced:
            example = f"{kind}(...).named('{self.name}_2')"
            raise ValueError(f"Plugin {self.name!r} is already registered: choose another name, as in {example}.")
        for word in own_claims:
            if (holder := claims.get(word)) is not None and holder not in replaced:
                words = ", ".join(sorted(word for word in own_claims if claims.get(word) == holder))
                names = f"{holder!r} and {self.name!r} both claim {words}"
                raise ValueError(f"Plugins {names}, which is exclusive: unregister one of them.")
        registered = tuple(type(entry.plugin) for entry in entries.values())
        missing = [kind for kind in self.brings if not any(issubclass(present, kind) for present in registered)]
        for brought_kind in missing:
            if (name := brought_kind.name) in {self.name, *entries}:
                raise ValueError(f"{kind} brings a plugin {name!r}, but another plugin has that name: rename it.")
        return replaced, missing

    @property
    def brings(self) -> tuple[Any, ...]:
        return tuple(getattr(self.plugin, "brings", ()))

    def brought_only_by_this(self, remaining: Collection[PluginEntry]) -> list[str]:
        wanted = {kind for entry in remaining for kind in entry.brings}
        unwanted = tuple(set(self.brings) - wanted)
        return [entry.name for entry in remaining if entry.is_brought and isinstance(entry.plugin, unwanted)]

    def subscription(self, event: type[Event], handler: Handler) -> Subscription:
        gate = None if self.gate is None else self.gate.gate_for(event)
        idle = getattr(self.plugin, handler.mark.idle_until) if handler.mark.idle_until else None
        owner, paused = PluginName(self.name), not self.is_active
        return Subscription(handler.position, owner, handler.when, paused=paused, gate=gate, idle_until=idle)

    def declared(self, attribute: str) -> tuple[str, ...]:
        """Return a declaration such as `exclusive`; it is optional for any object."""
        words = getattr(self.plugin, attribute, ())
        if isinstance(words, str):
            raise TypeError(f"Plugin {self.name!r} declares {attribute} = {words!r}: use a tuple, ({words!r},).")
        return tuple(words)

    def stateful_filters(self) -> dict[str, Any]:
        """Return the handlers' filters that have a state, by `<method>/<event>`."""
        return {
            f"{handler.method.__name__}/{event.name}": handler.when
            for event, handler in self.handlers
            if hasattr(handler.when, "state_dict")
        }


def make_entry(plugin: Any, name: str | None = None) -> PluginEntry:
    """Return the entry of an object to register, under its own name or another one.

    Raises:
        TypeError: it is not a plugin, a handler does not fit its event, or only one of the two state methods exists.
        ValueError: a declaration is unknown.
    """
    default_name = getattr(plugin, "name", None)
    name = name or (default_name if isinstance(default_name, str) else snake_case(type(plugin).__name__))
    entry = PluginEntry(name, plugin, list(_handlers_of(plugin, name)))
    _check_declarations(entry)
    _check_state(entry)
    if entry.has_lifecycle and plugin.condition is not None:
        from .conditions import ConditionGate

        agrees = entry.ranks == "all" and not entry.is_observer
        entry.gate = ConditionGate(plugin.condition, name if agrees else None)
    return entry


def _check_declarations(entry: PluginEntry) -> None:
    if (policy := getattr(entry.plugin, "policy", "critical")) not in ("critical", "observer"):
        raise ValueError(f"Plugin {entry.name!r} has policy {policy!r}: use 'critical' or 'observer'.")
    for attribute, allowed in (("asks", ASKED), ("needs", ASKED | {"validation data"})):
        for word in entry.declared(attribute):
            if word not in allowed:
                subject = f"Plugin {entry.name!r} declares {attribute} = ({word!r},), which is unknown."
                raise ValueError(f"{subject}{known_names(str(word), allowed)}")
    if entry.ranks not in ("all", "main", "local_main"):
        raise ValueError(f"Plugin {entry.name!r} has ranks {entry.ranks!r}: use 'all', 'main' or 'local_main'.")


def _check_state(entry: PluginEntry) -> None:
    plugin, kind = entry.plugin, type(entry.plugin).__name__
    if _overrides(plugin, "state_dict") != _overrides(plugin, "load_state_dict"):
        raise TypeError(f"{kind} has only one of state_dict and load_state_dict: define both or neither.")
    version = getattr(plugin, "state_version", 1)
    check_whole_number(f"state_version of plugin {entry.name!r}", version, at_least=1)
    if version > 1 and not _overrides(plugin, "migrate_state"):
        raise TypeError(f"{kind} has state_version {version} and no migrate_state(self, state, version): define it.")


def _overrides(plugin: object, method: str) -> bool:
    return getattr(type(plugin), method, None) not in (None, getattr(Plugin, method))


def _handlers_of(plugin: object, name: str) -> Iterator[tuple[type[Event], Handler]]:
    if isinstance(plugin, str):
        raise TypeError(
            f"Plugins are objects, such as EarlyStopping(patience=3); got the string {plugin!r}. To load an installed "
            f"plugin by its name, call trainer.plugins.load({plugin!r}), with options after the name."
        )
    if isinstance(plugin, type):
        raise TypeError(f"{plugin.__name__} is a class: register an object, {plugin.__name__}(...).")
    marks = list(marked_methods(type(plugin)))
    check_hooks(type(plugin), {method for method, _ in marks})
    if not marks:
        from .providers import check_without_handlers  # imported for a plugin without handlers

        declares = any(getattr(plugin, attribute, ()) for attribute in ("asks", "needs", "exclusive"))
        check_without_handlers(
            plugin, is_plugin=isinstance(plugin, Plugin), does_more=declares or _overrides(plugin, "state_dict")
        )
    for method_name, mark in marks:
        method: Callable[..., Any] = getattr(plugin, method_name)
        if mark.idle_until and not callable(getattr(plugin, str(mark.idle_until), None)):
            kind = type(plugin).__name__
            raise TypeError(f"{kind}.{method_name} has idle_until={mark.idle_until!r}, but {kind} has no such method.")
        for event in mark.events:
            check_receiver(method, event)
            if event not in getattr(plugin, "ignores", ()):
                yield event, Handler(name, method, mark, deepcopy(mark.when))


def check_hooks(kind: type, marked: Collection[str] = (), how: str = "Mark it with its event, and") -> None:
    """Raise TypeError for unmarked methods that look like other frameworks' hooks."""
    if {value.__module__.partition(".")[0] for value in kind.__mro__} & {*BRIDGES, "keras", "tensorflow"}:
        return  # the other framework calls them
    functions = [(name, value) for base in kind.__mro__ for name, value in vars(base).items() if isfunction(value)]
    called = {name for _, value in functions for name in value.__code__.co_names}
    for name in dict(functions).keys() - {*marked, *called}:
        if event := _event_of_hook(name):
            raise TypeError(
                f"No event calls {kind.__name__}.{name}{signature(getattr(kind, name))}. {how} let it take the run "
                f"and the event, as in\n    @on({event})\n    def {name}(self, run, event): ..."
            )


def _event_of_hook(name: str) -> str:
    if not name.startswith("on_") and not name.endswith("_epoch_end"):
        return ""
    word = re.sub("^(validation|test|predict)_epoch", r"\1", name.removeprefix("on_").replace("_begin", "_start"))
    word = re.sub("^train_(?=epoch|batch)", "", word)
    event_name = next((event.__name__ for event in CATALOGUE if event.name == word), "")
    if event_name:
        return event_name
    from .providers import hint  # imported for a method that looks like a hook

    return hint(word, "hooks").strip()


class HandlerOrder:
    """The order of the handlers of all events of a bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._handlers: dict[type[Event], list[Handler]] = {}  # in the order of their registration

    def add(self, handlers: Iterable[tuple[type[Event], Handler]]) -> None:
        """Order a plugin's handlers.

        Raises:
            ValueError: there is a cycle; nothing was changed.
        """
        changed: dict[type[Event], list[Handler]] = {}
        for event, handler in handlers:
            changed.setdefault(event, [*self._handlers.get(event, ())]).append(handler)
        self._move({event: ordered(event, listed) for event, listed in changed.items()})
        self._handlers |= changed

    def remove(self, event: type[Event], handler: Handler) -> None:
        self._handlers[event].remove(handler)
        self._move({event: ordered(event, self._handlers[event])})

    def _move(self, orders: dict[type[Event], list[Handler]]) -> None:
        for event, handlers in orders.items():
            for place, handler in enumerate(handlers):
                handler.place = place
            self._bus.signal(event).move((handler.method, handler.position) for handler in handlers)


def ordered(event: type[Event], handlers: list[Handler]) -> list[Handler]:
    """Return handlers by lane; in a lane, the next one is the first registered of those that may run next.

    Raises:
        ValueError: there is a cycle.
    """
    earlier = {handler: {other for other in handlers if other.mark.lane < handler.mark.lane} for handler in handlers}
    for handler in handlers:
        for other in handlers:
            if other.plugin in handler.mark.names_after:
                earlier[handler].add(other)
            if other.plugin in handler.mark.names_before:
                earlier[other].add(handler)
    sorter = TopologicalSorter(earlier)
    try:
        sorter.prepare()
    except CycleError as error:
        names = " -> ".join(f"{handler.plugin} ({handler.mark.lane.name})" for handler in error.args[1])
        raise ValueError(
            f"The handlers of {event.__name__} cannot be ordered: before, after and lanes form a cycle: {names}."
        ) from None
    ready: list[Handler] = []
    result: list[Handler] = []
    while sorter.is_active():
        ready += sorter.get_ready()
        result.append(min(ready, key=handlers.index))
        ready.remove(result[-1])
        sorter.done(result[-1])
    return result
