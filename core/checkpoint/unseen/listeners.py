"""The listeners of events: connected functions, the user's plugins, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypedDict

from ....events import (
    LastBoundary,
    PredictBatchEnd,
    PredictBatchStart,
    PredictEnd,
    PredictStart,
    Run,
    RunClosed,
    RunFailed,
    TestBatchEnd,
    TestBatchStart,
    TestEnd,
    TestStart,
    TrainEnd,
)
from ....events.bus import FunctionName, PluginName, Subscription
from ....events.checks import describe
from ....plugins.filters import Filter
from ...data.draws.users_code import attributes_of, is_users
from .program import Program, affects_training
from .values import Value, encode, equal, show, show_both
from .variables import Connections, connections, is_number, receiver_object

AFTERWARDS: Final = {
    LastBoundary, PredictBatchEnd, PredictBatchStart, PredictEnd, PredictStart, RunClosed, RunFailed,
    TestBatchEnd, TestBatchStart, TestEnd, TestStart, TrainEnd,
}  # fmt: skip
OBSERVE: Final = "or let an observer connect it, if no bit of the training depends on it"
GONE: Final = f"connect it at TrainStart or at CheckpointLoaded, {OBSERVE}"
NEW: Final = f"remove or pause it at CheckpointLoaded, too, {OBSERVE}"
SAME: Final = f"connect the same at CheckpointLoaded, {OBSERVE}"
COUNTS: Final = "give the filter to a handler of a plugin, @on(..., when=...), whose count is saved"


class Listener(TypedDict):
    """A function or method that listens to an event.

    Attributes:
        function: its name.
        plugin: the plugin whose method it is, or which connected it; empty for neither.
        is_method: whether it is a handler of the plugin's class.
        is_users: whether it is the user's.
        bound: the arguments of its `functools.partial` and the attributes of its object, encoded.
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


def describe_listeners(run: Run, connected: Connections | None = None) -> dict[str, list[Listener]]:
    """Return the listeners of each event of a training, in their order, if any of them is the user's.

    Observers and what they connect are left out, and so are events after the training: these cannot change it.

    Args:
        run: the run.
        connected: what listens, if that is known.
    """
    found: dict[str, list[Listener]] = {}
    named = zip(run.plugins.names(), run.plugins, strict=True)
    observers = {name for name, plugin in named if not affects_training(plugin)}
    for event, listeners in connections(run) if connected is None else connected:
        if event in AFTERWARDS or not any(_is_users(receiver) for receiver, _ in listeners):
            continue
        compared = [(receiver, each) for receiver, each in listeners if _plugin(each) not in observers]
        if any(_is_users(receiver) for receiver, _ in compared):
            found[event.__name__] = [_listener(run, receiver, each) for receiver, each in compared]
    return found


def compare_listeners(before: Listeners, now: Listeners, plugins: Program, others: Program) -> Iterator[str]:
    """Yield each difference between the saved and the present listeners of the user or of a plugin, and their order.

    Functions that were connected outside of plugins may be added and removed: most of them resume, stop or print.

    Args:
        before: the saved listeners.
        now: the present ones.
        plugins: the saved plugins.
        others: the present ones.
    """
    compared = {name for name in others if _is_unchanged(name, plugins, others)}  # changed plugins are reported anyway
    for event in sorted({*before, *now}):
        then = [each for each in before.get(event, ()) if each["plugin"] in {"", *compared}]
        here = [each for each in now.get(event, ()) if each["plugin"] in {"", *compared}]
        for function in sorted(_count(then) - _count(here, outside=True)):
            yield f"{function} listened to {event} and does not: {GONE}"
        for function in sorted(_count(here) - _count(then, outside=True)):
            yield f"{function} listens to {event} and did not: {NEW}"
        yield from _other_calls(event, then, here)
        yield from _other_order(event, then, here)


def _plugin(subscription: Subscription) -> str:
    return "" if isinstance(subscription.owner, FunctionName) else str(subscription.owner)


def _listener(run: Run, receiver: Callable[..., Any], subscription: Subscription) -> Listener:
    is_method = isinstance(subscription.owner, PluginName)
    when, emissions = (
        (encode("always"), 0) if is_method else _filter(run, subscription.when)
    )  # a plugin's is in its state
    return {
        "function": str(describe(_function(receiver))),
        "plugin": _plugin(subscription),
        "is_method": is_method,
        "is_users": _is_users(receiver),
        "bound": encode(None) if is_method else _bound(run, receiver),
        "when": when,
        "emissions": emissions,
    }


def _is_users(receiver: Callable[..., Any]) -> bool:
    function = _function(receiver)
    return is_users(str(getattr(function, "__module__", None) or type(function).__module__))


def _filter(run: Run, when: Any) -> tuple[Value, int]:
    """Return a filter, encoded, and how many events it has counted."""
    if not isinstance(when, Filter):
        return encode("always" if when is None else when), 0
    return encode(str(when)), when.state_dict(run.origin)["emissions"] if when.unit == "emissions" else 0


def _bound(run: Run, receiver: Callable[..., Any]) -> Value:
    """Return the numbers and strings among the arguments of a partial and the attributes of the receiver's object.

    Lists and other objects are left out, since most of them are logs.
    """
    arguments: dict[Any, Any] = {}
    while isinstance(receiver, partial):
        arguments = dict[Any, Any](enumerate(receiver.args)) | receiver.keywords | arguments
        receiver = receiver.func
    arguments |= attributes_of(receiver_object(run, receiver))
    return encode({str(name): value for name, value in arguments.items() if is_number(value) or type(value) is str})


def _function(receiver: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(receiver, partial):
        receiver = receiver.func
    return receiver


def _is_unchanged(name: str, plugins: Program, others: Program) -> bool:
    """Return whether a plugin that affects the training has the same class and is still enabled or disabled."""
    then, here = plugins.get(name, {}), others[name]
    same = all(then.get(fact) == here[fact] for fact in ("class", "enabled", "affects_training"))
    return same and bool(here["affects_training"])


def _count(found: Iterable[Listener], *, outside: bool = False) -> Counter[str]:
    """Count how often each of the user's functions listens: those of plugins, and with `outside` the others too."""
    return Counter(each["function"] for each in found if each["is_users"] and (outside or each["plugin"]))


def _other_calls(event: str, then: Sequence[Listener], here: Sequence[Listener]) -> Iterator[str]:
    """Yield the listeners that have other arguments, another filter, or a filter that has counted another number."""
    for one, other in _pairs(then, here):
        listens, is_plugins = f"{one['function']} listened to {event}", bool(one["plugin"] and other["plugin"])
        if is_plugins and not equal(one["bound"], other["bound"]):
            was, value = show_both(one["bound"], other["bound"])
            yield f"{listens} with {was} and listens with {value}: {SAME}"
        if not equal(one["when"], other["when"]):
            if is_plugins:
                yield f"{listens} when {show(one['when'])} and listens when {show(other['when'])}: {SAME}"
        elif one["emissions"] != other["emissions"]:
            counted = f"had counted {one['emissions']} events and has counted {other['emissions']}"
            yield f"{listens} by a filter that {counted}: {COUNTS}, {OBSERVE}"


def _pairs(then: Sequence[Listener], here: Sequence[Listener]) -> Iterator[tuple[Listener, Listener]]:
    """Yield the former and the present listener of the same function, in their order where it listens several times."""
    for function in dict.fromkeys(each["function"] for each in then if each["is_users"]):
        of_then, of_here = ([each for each in found if each["function"] == function] for found in (then, here))
        if len(of_then) == len(of_here):
            yield from zip(of_then, of_here, strict=True)


def _other_order(event: str, then: Sequence[Listener], here: Sequence[Listener]) -> Iterator[str]:
    """Yield a sentence if the listeners of plugins have another order and one of them is the user's."""
    users = {_label(each) for each in (*then, *here) if each["plugin"] and each["is_users"]}
    was, value = ([*dict.fromkeys(_label(each) for each in found if each["plugin"])] for found in (then, here))
    was, value = [each for each in was if each in value], [each for each in value if each in was]
    if was != value and users.intersection(was):
        yield f"the order of the listeners to {event} was {', '.join(was)} and is {', '.join(value)}"


def _label(listener: Listener) -> str:
    return listener["plugin"] if listener["is_method"] else listener["function"]
