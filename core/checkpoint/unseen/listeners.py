"""What listens to events, and how: functions that were connected, the user's plugins, and the order of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypedDict

from ....events import Run, RunClosed, RunFailed, TestBatchEnd, TestBatchStart, TestEnd, TestStart, TrainEnd
from ....events.bus import FunctionName, OrderedSignal, PluginName, Subscription
from ....events.checks import describe
from ....plugins.filters import Filter
from ...data.draws.users_code import attributes_of, is_users
from .attributes import Value, encode, equal, show, shown_apart
from .variables import Program, affects_training, held_by, is_number

AFTERWARDS: Final = {RunClosed, RunFailed, TestBatchEnd, TestBatchStart, TestEnd, TestStart, TrainEnd}
OBSERVE: Final = "or let an observer connect it, if no bit of the training depends on it"
GONE: Final = f"connect it at TrainStart or at CheckpointLoaded, {OBSERVE}"
NEW: Final = f"remove or pause it at CheckpointLoaded, too, {OBSERVE}"
SAME: Final = f"connect the same at CheckpointLoaded, {OBSERVE}"
COUNTS: Final = "give the filter to a handler of a plugin, @on(..., when=...), whose count is saved"


class Listener(TypedDict):
    """One that listens to an event.

    Attributes:
        function: that is called.
        plugin: whose method it is, or which connected it; empty for neither.
        is_method: whether it is what a plugin was registered with.
        is_users: whether it is the user's.
        bound: what it is called with or on, encoded: arguments of a `functools.partial`, an object with such a method.
        when: its filter, encoded.
        emissions: how many events its filter has counted.
    """

    function: str
    plugin: str
    is_method: bool
    is_users: bool
    bound: Value
    when: Value
    emissions: int


Listeners = Mapping[str, Sequence[Listener]]


def listeners(run: Run) -> dict[str, list[Listener]]:
    """Return, in their order, what listens to each event before the training ends, where any of them is the user's.

    Observers and what they connect are left out.
    """
    found: dict[str, list[Listener]] = {}
    observers = {name for name in run.plugins.names() if not affects_training(run.plugins[name])}
    for signal in _signals(run):
        seated = ((receiver, seat) for receiver, seat in signal.listeners() if _plugin(seat) not in observers)
        each = [_listener(run, receiver, seat) for receiver, seat in seated]
        if any(listener["is_users"] for listener in each):
            found[signal.event.__name__] = each
    return found


def listening_changes(before: Listeners, now: Listeners, plugins: Program, others: Program) -> Iterator[str]:
    """Yield what of the user's, or what a plugin connected, listens otherwise than it did, and orders that changed.

    Functions that were connected outside of plugins may come and leave: most of them resume, stop or print.

    Args:
        before: the listeners as they were saved.
        now: as they are.
        plugins: what was saved of the plugins, too.
        others: what they are now.
    """
    compared = {name for name in others if _is_as_it_was(name, plugins, others)}  # others are named themselves
    for event in sorted({*before, *now}):
        then = [each for each in before.get(event, ()) if each["plugin"] in {"", *compared}]
        here = [each for each in now.get(event, ()) if each["plugin"] in {"", *compared}]
        for function in sorted(_counted(then) - _counted(here, outside=True)):
            yield f"{function} listened to {event} and does not: {GONE}"
        for function in sorted(_counted(here) - _counted(then, outside=True)):
            yield f"{function} listens to {event} and did not: {NEW}"
        yield from _other_calls(event, then, here)
        yield from _other_order(event, then, here)


def _signals(run: Run) -> list[OrderedSignal[Any]]:
    """Return the signals of events that come before the training ends: later ones can change no bit of it."""
    return [signal for signal in run.bus.signals() if signal.event not in AFTERWARDS]


def _plugin(seat: Subscription) -> str:
    return "" if isinstance(seat.owner, FunctionName) else str(seat.owner)


def _listener(run: Run, receiver: Callable[..., Any], seat: Subscription) -> Listener:
    function, is_method = _function(receiver), isinstance(seat.owner, PluginName)
    module = getattr(function, "__module__", None) or type(function).__module__
    when, emissions = (encode("always"), 0) if is_method else _filter(run, seat.when)  # a plugin's is in its state
    return {
        "function": str(describe(function)),
        "plugin": _plugin(seat),
        "is_method": is_method,
        "is_users": is_users(str(module)),
        "bound": encode(None) if is_method else _bound(run, receiver),
        "when": when,
        "emissions": emissions,
    }


def _filter(run: Run, when: Any) -> tuple[Value, int]:
    """Return a filter, encoded, and how many events it has counted."""
    if not isinstance(when, Filter):
        return encode("always" if when is None else when), 0
    return encode(str(when)), when.state_dict(run.origin)["emissions"] if when.unit == "emissions" else 0


def _bound(run: Run, receiver: Callable[..., Any]) -> Value:
    """Return the numbers and strings that a function is called with, or that the object holds that it is called on.

    Lists and other objects are left out, since most of them are logs.
    """
    arguments: dict[Any, Any] = {}
    while isinstance(receiver, partial):
        arguments = dict[Any, Any](enumerate(receiver.args)) | receiver.keywords | arguments
        receiver = receiver.func
    arguments |= attributes_of(held_by(run, receiver))
    return encode({str(name): value for name, value in arguments.items() if is_number(value) or type(value) is str})


def _function(receiver: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(receiver, partial):
        receiver = receiver.func
    return receiver


def _is_as_it_was(name: str, plugins: Program, others: Program) -> bool:
    """Return whether a plugin that affects the training is of the same class, and switched on or off, as it was."""
    then, here = plugins.get(name, {}), others[name]
    same = all(then.get(fact) == here[fact] for fact in ("class", "enabled", "affects_training"))
    return same and bool(here["affects_training"])


def _counted(found: Iterable[Listener], *, outside: bool = False) -> Counter[str]:
    """Return how often each function of the user's listens that a plugin has or connected, or that others did, too."""
    return Counter(each["function"] for each in found if each["is_users"] and (outside or each["plugin"]))


def _other_calls(event: str, then: Sequence[Listener], here: Sequence[Listener]) -> Iterator[str]:
    """Yield what is called with other values, or by another filter, or by one that has counted another number."""
    for one, other in _pairs(then, here):
        listens, is_plugins = f"{one['function']} listened to {event}", bool(one["plugin"] and other["plugin"])
        if is_plugins and not equal(one["bound"], other["bound"]):
            was, value = shown_apart(one["bound"], other["bound"])
            yield f"{listens} with {was} and listens with {value}: {SAME}"
        if not equal(one["when"], other["when"]):
            if is_plugins:
                yield f"{listens} when {show(one['when'])} and listens when {show(other['when'])}: {SAME}"
        elif one["emissions"] != other["emissions"]:
            counted = f"had counted {one['emissions']} events and has counted {other['emissions']}"
            yield f"{listens} by a filter that {counted}: {COUNTS}, {OBSERVE}"


def _pairs(then: Sequence[Listener], here: Sequence[Listener]) -> Iterator[tuple[Listener, Listener]]:
    """Yield what is the same function, as it was and as it is; where it listens several times, by its order."""
    for function in dict.fromkeys(each["function"] for each in then if each["is_users"]):
        of_then, of_here = ([each for each in found if each["function"] == function] for found in (then, here))
        if len(of_then) == len(of_here):
            yield from zip(of_then, of_here, strict=True)


def _other_order(event: str, then: Sequence[Listener], here: Sequence[Listener]) -> Iterator[str]:
    """Yield how those that listened and listen do so in another order, where one of them is the user's."""
    users = {_label(each) for each in (*then, *here) if each["plugin"] and each["is_users"]}
    was, value = ([*dict.fromkeys(_label(each) for each in found if each["plugin"])] for found in (then, here))
    was, value = [each for each in was if each in value], [each for each in value if each in was]
    if was != value and users.intersection(was):
        yield f"the order of the listeners to {event} was {', '.join(was)} and is {', '.join(value)}"


def _label(listener: Listener) -> str:
    return listener["plugin"] if listener["is_method"] else listener["function"]
