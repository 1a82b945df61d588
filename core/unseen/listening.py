"""Functions of the user's that listen to events; the methods that a plugin was registered with are its class's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ...events import RunClosed, RunFailed, TestBatchEnd, TestBatchStart, TestEnd, TestStart, TrainEnd
from ...events.bus import OrderedSignal
from ...events.checks import describe
from ...plugins.entry import PluginName
from ..data.users_code import is_users
from .program import Program, affects_training

if TYPE_CHECKING:
    from ..context import RunContext

AFTERWARDS: Final = {RunClosed, RunFailed, TestBatchEnd, TestBatchStart, TestEnd, TestStart, TrainEnd}
OBSERVE: Final = "or let an observer connect it, if no bit of the training depends on it"
GONE: Final = f"connect it at TrainStart or at CheckpointLoaded, {OBSERVE}"
NEW: Final = f"remove or pause it at CheckpointLoaded, too, {OBSERVE}"
Listeners = Mapping[str, Mapping[str, list[str]]]


def listeners(run: RunContext) -> dict[str, dict[str, list[str]]]:
    """Return what listens to events that come before the training ends: by event and function, who connected it.

    That is a plugin's name, or nothing where it was connected outside of all plugins.
    """
    found: dict[str, dict[str, list[str]]] = {}
    names = set(run.plugins.names())
    for signal in _signals(run):
        for receiver, owner in signal.listeners():
            function = _function(receiver)
            if is_users(str(getattr(function, "__module__", ""))) and not isinstance(owner, PluginName):
                functions = found.setdefault(signal.event.__name__, {})
                functions.setdefault(str(describe(function)), []).append(owner if owner in names else "")
    return found


def listening_changes(before: Listeners, now: Listeners, plugins: Program, others: Program) -> Iterator[str]:
    """Yield which functions that a plugin connected listened and do not, and which do and did not.

    Those that were connected outside of plugins are not looked for: most of them resume, stop or print.

    Args:
        before: the listeners as they were saved.
        now: as they are.
        plugins: what was saved of the plugins, too.
        others: what they are now.
    """
    compared = {name for name in others if _is_as_it_was(name, plugins, others)}  # others are named themselves
    for event in sorted({*before, *now}):
        then, here = before.get(event, {}), now.get(event, {})
        for function in sorted(_counted(then, compared) - _counted(here)):
            yield f"{function} listened to {event} and does not: {GONE}"
        for function in sorted(_counted(here, compared) - _counted(then)):
            yield f"{function} listens to {event} and did not: {NEW}"


def orders(run: RunContext) -> dict[str, list[str]]:
    """Return by event which plugins listen, in their order, where one of them is the user's: of observers nothing."""
    found: dict[str, list[str]] = {}
    plugins = {name: run.plugins[name] for name in run.plugins.names()}
    affecting = {name for name, plugin in plugins.items() if affects_training(plugin)}
    for signal in _signals(run):
        owners = [owner for _, owner in signal.listeners() if isinstance(owner, PluginName) and owner in affecting]
        names = [str(name) for name in dict.fromkeys(owners)]
        if len(names) > 1 and any(is_users(type(plugins[name]).__module__) for name in names):
            found[signal.event.__name__] = names
    return found


def order_changes(before: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the first event at which plugins that listened and listen do so in another order."""
    for event in sorted(before.keys() & now.keys()):
        then = [name for name in before[event] if name in now[event]]
        here = [name for name in now[event] if name in before[event]]
        if then != here:
            yield f"the order of plugins at {event} was {', '.join(then)} and is {', '.join(here)}"
            return


def _signals(run: RunContext) -> list[OrderedSignal[Any]]:
    """Return the signals of events that come before the training ends: later ones can change no bit of it."""
    return [signal for signal in run.bus.signals() if signal.event not in AFTERWARDS]


def _function(receiver: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(receiver, partial):
        receiver = receiver.func
    return receiver


def _is_as_it_was(name: str, plugins: Program, others: Program) -> bool:
    """Return whether a plugin that affects the training is of the same class, and switched on or off, as it was."""
    then, here = plugins.get(name, {}), others[name]
    same = all(then.get(fact) == here[fact] for fact in ("class", "enabled", "affects_training"))
    return same and bool(here["affects_training"])


def _counted(functions: Mapping[str, list[str]], owners: Collection[str] | None = None) -> Counter[str]:
    """Return how often each function listens, of some plugins' or of all."""
    return Counter({name: sum(owners is None or each in owners for each in found) for name, found in functions.items()})
