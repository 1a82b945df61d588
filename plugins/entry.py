"""A registered plugin: its name, its handlers, and what it declares."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import getmembers, isfunction, signature
from typing import TYPE_CHECKING, Any, get_args

from ..events import CATALOGUE, Event, PluginFailed, Run
from ..events.bus import PluginName, Subscription
from ..events.checks import check_whole_number, known_names
from ..events.control import Verb
from ..events.errors import describe_error, is_interrupt
from ..events.signatures import check_receiver
from .filters import Filter
from .first_party import is_first_party
from .marks import marked_methods
from .order import Handler
from .plugin import Plugin, snake_case
from .providers import hint

if TYPE_CHECKING:
    from .conditions import ConditionGate

logger = logging.getLogger("heliograph")


class ObserverErrors:
    """The errors of a trainer's observers.

    Args:
        disable: disables a plugin that had too many.
    """

    def __init__(self, disable: Callable[[PluginEntry], None]) -> None:
        self._disable = disable

    def forgive_handler(self, entry: PluginEntry, run: Run, event: Event, error: BaseException) -> bool:
        """Log and list the error of an observer's handler, and disable the plugin after `max_errors`.

        Returns:
            Whether the run continues: False for an error of a critical plugin, and for a Ctrl-C.
        """
        if not entry.forgives(error):
            return False
        _add(entry, event.name, f"{event.name} at step {run.progress.steps}: {describe_error(error)}", error)
        if event.name != PluginFailed.name:  # it would never end
            run.emit(PluginFailed(entry.name, event.name, error))
        if len(entry.errors) >= getattr(entry.plugin, "max_errors", 3) and entry.enabled:
            run.warn(f"Plugin {entry.name!r} was switched off after {len(entry.errors)} errors: {entry.errors[-1]}.")
            logger.error("plugin %r is switched off after %d errors", entry.name, len(entry.errors))
            self._disable(entry)
        return True

    def forgive_state(
        self, entry: PluginEntry, run: Run | None, what: str, consequence: str, error: BaseException
    ) -> bool:
        """Log, list and note the error of an observer's state, once.

        Args:
            entry: the plugin.
            run: the present one, if there is one.
            what: the method that failed.
            consequence: what follows from it, for the note.
            error: what it raised.

        Returns:
            Whether the run continues: False for an error of a critical plugin, and for a Ctrl-C.
        """
        if not entry.forgives(error):
            return False
        line = f"{what}: {describe_error(error)}"
        if line not in entry.errors:
            _add(entry, what, line, error)
            if run is not None:
                run.note(f"plugin {entry.name!r}: {consequence}; {line}")
        return True

    def close(self, entry: PluginEntry) -> None:
        """Close a plugin; an observer's error is logged and listed like all of its errors."""
        try:
            if entry.has_lifecycle:
                entry.plugin.close()
        except BaseException as error:
            if not entry.forgives(error):
                raise
            _add(entry, "close", f"close: {describe_error(error)}", error)


def _add(entry: PluginEntry, what: str, line: str, error: BaseException) -> None:
    entry.errors.append(line)
    # the reason says all where the system refuses, as a full disk does
    traceback = None if isinstance(error, OSError) else error
    logger.error("plugin %r failed in %s: %s", entry.name, what, describe_error(error), exc_info=traceback)


ASKED = frozenset(get_args(Verb)) | {"scheduler"}  # what `asks` can name
BRIDGES = {
    "transformers": "from_huggingface(...) of heliograph_bridges.huggingface",
    "trl": "from_huggingface(...) of heliograph_bridges.huggingface",
    "lightning": "from_lightning(...) of heliograph_bridges.lightning",
    "pytorch_lightning": "from_lightning(...) of heliograph_bridges.lightning",
    "ignite": "from_ignite(...) of heliograph_bridges.ignite",
}


@dataclass(slots=True)
class PluginEntry:
    """A registered plugin and what the manager knows of it.

    Attributes:
        disabled_at: the step of the run at which it was disabled; None where that was before, or not at all.
        is_brought: whether another plugin brought it; a registration of its class replaces it then.
    """

    name: str
    plugin: Any
    handlers: list[tuple[type[Event], Handler]]
    filters: list[Any]
    enabled: bool = True
    runs_on_this_rank: bool = True
    disabled_by_errors: bool = False
    disabled_at: int | None = None
    is_brought: bool = False
    errors: list[str] = field(default_factory=list)
    gate: ConditionGate | None = None

    @property
    def is_active(self) -> bool:
        """Whether its handlers are called on this rank."""
        return self.enabled and self.runs_on_this_rank

    @property
    def ranks(self) -> str:
        """On which ranks its handlers run."""
        return str(getattr(self.plugin, "ranks", "all"))

    @property
    def is_observer(self) -> bool:
        """Whether its errors do not fail a run."""
        return getattr(self.plugin, "policy", "critical") == "observer"

    @property
    def has_lifecycle(self) -> bool:
        """Whether it is reset before a training and closed after a run; any object with handlers may do without."""
        return isinstance(self.plugin, Plugin)

    @property
    def is_unredirected(self) -> bool:
        """Whether it is the user's and has no `rehearse(folder)`, so it writes where it always does, if at all."""
        plugin = self.plugin
        can_be_redirected = self.has_lifecycle and type(plugin).rehearse is not Plugin.rehearse
        if can_be_redirected or is_first_party(type(plugin).__module__) or not getattr(plugin, "rehearses", True):
            return False
        return hasattr(plugin, "__dict__")

    @property
    def state_version(self) -> int:
        """The version of its state."""
        return int(getattr(self.plugin, "state_version", 1))

    def toggle(self, *, enabled: bool, run: Run | None) -> bool:
        """Enable or disable it, perhaps in a run; return whether it was enabled."""
        before, self.enabled = self.enabled, enabled
        if enabled != before:
            self.disabled_at = None if enabled or run is None else run.progress.steps
        return before

    def forget_run(self) -> None:
        """Forget what became of it in the former run."""
        self.disabled_by_errors, self.disabled_at = False, None
        self.errors.clear()

    def forgives(self, error: BaseException) -> bool:
        """Return whether a run continues in spite of its error."""
        return self.is_observer and not is_interrupt(error)

    def reset_filters(self) -> None:
        """Forget whether the filters of its handlers let something through in a former training."""
        for when in self.filters:
            if isinstance(when, Filter):
                when.passed = False
        if self.gate is not None:
            self.gate.reset()

    def check_condition(self) -> None:
        """Raise RuntimeError where the plugin was given its condition after it was registered."""
        known = None if self.gate is None else self.gate.condition
        if self.has_lifecycle and self.plugin.condition is not known:
            raise RuntimeError(
                f"Plugin {self.name!r} was given a condition when it was registered already, where it has no effect: "
                f"call when() before, as in Trainer([{type(self.plugin).__name__}(...).when(...)])."
            )

    def check_is_free(
        self, entries: Mapping[str, PluginEntry], claims: Mapping[str, str], own_claims: Iterable[str]
    ) -> tuple[list[str], list[type]]:
        """Raise ValueError where the object, its name or a capability is registered already.

        Returns:
            The names of brought plugins that this one replaces, and the classes of which it brings one.
        """
        kind = type(self.plugin).__name__
        if any(entry.plugin is self.plugin for entry in entries.values()):
            raise ValueError(f"This {kind} is registered already.")
        brought = {name: entry.plugin for name, entry in entries.items() if entry.is_brought}
        replaced = [name for name, plugin in brought.items() if isinstance(self.plugin, type(plugin))]
        if self.name in entries and self.name not in replaced:
            mend = f"{kind}(...).named('{self.name}_2')"
            raise ValueError(f"A plugin named {self.name!r} is registered: give this one another name, as in {mend}.")
        for word in own_claims:
            if (other := claims.get(word)) is not None and other not in replaced:
                both = ", ".join(sorted(each for each in own_claims if claims.get(each) == other))
                names = f"{other!r} and {self.name!r} both claim {both}"
                raise ValueError(f"Plugins {names}, which only one may: unregister one of them.")
        registered = tuple(type(entry.plugin) for entry in entries.values())
        missing = [each for each in self.brings if not any(issubclass(other, each) for other in registered)]
        for each in missing:
            if each.name in {self.name, *entries}:
                raise ValueError(f"{kind} brings a plugin {each.name!r}, and another one has that name: rename it.")
        return replaced, missing

    @property
    def brings(self) -> tuple[Any, ...]:
        """The classes of which it brings a plugin, unless one is registered."""
        return tuple(getattr(self.plugin, "brings", ()))

    def brought_alone(self, others: Collection[PluginEntry]) -> list[str]:
        """Return the names of the plugins that were brought by this one and by none of the others."""
        wanted = {kind for entry in others for kind in entry.brings}
        gone = tuple(set(self.brings) - wanted)
        return [entry.name for entry in others if entry.is_brought and isinstance(entry.plugin, gone)]

    def check_is_in_no_run(self, in_runs: Iterable[tuple[Mapping[int, PluginEntry], Run | None]]) -> None:
        """Raise RuntimeError where the plugin is in a run, which it would be reset and closed under."""
        for entries, run in in_runs:
            if (other := entries.get(id(self.plugin))) is not None:
                name = "" if run is None else f" {run.name!r}"
                raise RuntimeError(
                    f"Plugin {other.name!r} is in the run{name} of another trainer, to which it belongs until that "
                    f"ends: give this trainer another {type(self.plugin).__name__}."
                )

    def subscription(self, event: type[Event], handler: Handler, when: Any) -> Subscription:
        """Return what the bus needs of a handler."""
        gate = None if self.gate is None else self.gate.of(event)
        idle = getattr(self.plugin, handler.mark.idle_until) if handler.mark.idle_until else None
        owner, paused = PluginName(self.name), not self.is_active
        return Subscription(handler.position, owner, when, paused=paused, gate=gate, idle_until=idle)

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


def make_entry(plugin: Any, name: str | None = None) -> PluginEntry:
    """Return the entry of an object that is to be registered, by its own name unless another is given.

    Raises:
        TypeError: it is not a plugin, or has a handler that does not fit its event, or one half of what a state takes.
        ValueError: it declares something that there is not.
    """
    own = getattr(plugin, "name", None)
    name = name or (own if isinstance(own, str) else snake_case(type(plugin).__name__))
    handlers = list(_handlers_of(plugin, name))
    entry = PluginEntry(name, plugin, handlers, [deepcopy(handler.mark.when) for _, handler in handlers])
    _check_declarations(entry)
    _check_state(entry)
    if entry.has_lifecycle and plugin.condition is not None:
        from .conditions import ConditionGate

        agrees = entry.ranks == "all" and not entry.is_observer
        entry.gate = ConditionGate(plugin.condition, name if agrees else None)
    return entry


def _check_declarations(entry: PluginEntry) -> None:
    if (policy := getattr(entry.plugin, "policy", "critical")) not in ("critical", "observer"):
        raise ValueError(f"Plugin {entry.name!r} has policy {policy!r}: it is 'critical' or 'observer'.")
    for attribute, known in (("asks", ASKED), ("needs", ASKED | {"validation data"})):
        for word in entry.declared(attribute):
            if word not in known:
                what = f"Plugin {entry.name!r} declares {attribute} = ({word!r},), which no loop does."
                raise ValueError(f"{what}{known_names(str(word), known)}")
    if entry.ranks not in ("all", "main", "local_main"):
        raise ValueError(f"Plugin {entry.name!r} has ranks {entry.ranks!r}: they are 'all', 'main' or 'local_main'.")


def _check_state(entry: PluginEntry) -> None:
    plugin, kind = entry.plugin, type(entry.plugin).__name__
    if _overrides(plugin, "state_dict") != _overrides(plugin, "load_state_dict"):
        raise TypeError(f"{kind} has one of state_dict and load_state_dict: a plugin needs both or neither.")
    version = getattr(plugin, "state_version", 1)
    check_whole_number(f"state_version of plugin {entry.name!r}", version, at_least=1)
    if version > 1 and not _overrides(plugin, "migrate_state"):
        raise TypeError(
            f"{kind} has state_version {version} and no migrate_state(self, state, version), which returns an older "
            f"state as load_state_dict takes it now."
        )


def _overrides(plugin: object, method: str) -> bool:
    """Return whether a plugin has a method of its own, not the base class's empty one."""
    return getattr(type(plugin), method, None) not in (None, getattr(Plugin, method))


def _handlers_of(plugin: object, name: str) -> Iterator[tuple[type[Event], Handler]]:
    if isinstance(plugin, str):
        raise TypeError(
            f"{plugin!r} is a name, and plugins are objects: give one, such as EarlyStopping(patience=3). A trainer "
            f"loads an installed plugin by its name, trainer.plugins.load({plugin!r}), with options after that; "
            f"`python -m heliograph plugins` lists the names."
        )
    if isinstance(plugin, type):
        raise TypeError(f"{plugin.__name__} is a class: register an object of it, {plugin.__name__}(...).")
    marks = list(marked_methods(type(plugin)))
    check_hooks(type(plugin), {method for method, _ in marks})
    if not marks:
        _check_without_handlers(plugin)
    for method_name, mark in marks:
        method: Callable[..., Any] = getattr(plugin, method_name)
        if mark.idle_until and not callable(getattr(plugin, str(mark.idle_until), None)):
            kind = type(plugin).__name__
            raise TypeError(
                f"{kind}.{method_name} is marked with idle_until={mark.idle_until!r}, and {kind} has no such method: "
                f"name one that takes the run and returns a count and its next due value."
            )
        for event in mark.events:
            check_receiver(method, event)
            if event not in getattr(plugin, "ignores", ()):
                yield event, Handler(name, method, mark)


def check_hooks(kind: type, marked: Collection[str] = (), how: str = "Mark it with its event, and") -> None:
    """Raise TypeError if a class has an unmarked method as other frameworks call theirs, which nothing would call."""
    if {each.__module__.partition(".")[0] for each in kind.__mro__} & {*BRIDGES, "keras", "tensorflow"}:
        return  # that framework calls it
    functions = [(name, each) for base in kind.__mro__ for name, each in vars(base).items() if isfunction(each)]
    called = {name for _, each in functions for name in each.__code__.co_names}
    for name in dict(functions).keys() - {*marked, *called}:
        if event := _event_of_hook(name):
            raise TypeError(
                f"No event calls {kind.__name__}.{name}{signature(getattr(kind, name))}. {how} let it take the run "
                f"and the event, as in\n    @on({event})\n    def {name}(self, run, event): ..."
            )


def _event_of_hook(name: str) -> str:
    """Return the event at which other frameworks call a method of this name; empty if there is none."""
    if not name.startswith("on_") and not name.endswith("_epoch_end"):
        return ""
    word = re.sub("^(validation|test|predict)_epoch", r"\1", name.removeprefix("on_").replace("_begin", "_start"))
    word = re.sub("^train_(?=epoch|batch)", "", word)
    own = next((event.__name__ for event in CATALOGUE if event.name == word), "")
    return own or hint(word, "hooks").strip()


def _check_without_handlers(plugin: object) -> None:
    """Raise TypeError unless an object without handlers is a `Plugin` that has a state or declares something."""
    kind = type(plugin)
    for name, method in getmembers(kind, isfunction):
        if list(signature(method).parameters)[1:] == ["run", "event"]:
            raise TypeError(
                f"No event calls {kind.__name__}.{name}(run, event): mark it with its event, as in\n    @on(EpochEnd)\n"
                f"    def {name}(self, run, event): ..."
            )
    packages = {each.__module__.partition(".")[0] for each in kind.__mro__}
    if bridge := next((BRIDGES[each] for each in sorted(packages & BRIDGES.keys())), None):
        install = "pip install ./packages/bridges"
        raise TypeError(f"{kind.__name__} is a callback of another framework: register {bridge} ({install}).")
    if isinstance(plugin, Iterable):
        raise TypeError(
            f"{kind.__name__} is not a plugin, but holds some: give it without the brackets around it, as in "
            f"Trainer(plugins), or unpack it, as in Trainer([*plugins, EarlyStopping()])."
        )
    declares = any(getattr(plugin, attribute, ()) for attribute in ("asks", "needs", "exclusive"))
    if isinstance(plugin, Plugin) and (declares or _overrides(plugin, "state_dict")):
        return
    form = "an object with methods marked @on, as in\n    @on(EpochEnd)\n    def report(self, run, event): ..."
    rest = "\nA Plugin without such methods has a state, or declares what functions on the bus request, in asks."
    raise TypeError(f"{plugin!r} is not a plugin: register {form}{rest if isinstance(plugin, Plugin) else ''}")
