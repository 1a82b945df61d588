"""The listeners of events: connected functions, plugins of the user, their order, and the numbers in their code."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Final, NamedTuple, TypedDict

from torch import nn

from ....events import (
    Event,
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
from ...data.draws.users_code import attributes_of, global_names, is_users, unwrapped
from .attributes import ignored_names
from .program import Program, affects_training
from .values import Value, encode, equal, show, show_both

AFTERWARDS: Final = {
    LastBoundary, PredictBatchEnd, PredictBatchStart, PredictEnd, PredictStart, RunClosed, RunFailed,
    TestBatchEnd, TestBatchStart, TestEnd, TestStart, TrainEnd,
}  # fmt: skip
OBSERVE: Final = "or let an observer connect it, if no bit of the training depends on it"
GONE: Final = f"connect it at TrainStart or at CheckpointLoaded, {OBSERVE}"
NEW: Final = f"remove or pause it at CheckpointLoaded, too, {OBSERVE}"
SAME: Final = f"connect the same at CheckpointLoaded, {OBSERVE}"
COUNTS: Final = "give the filter to a handler of a plugin, @on(..., when=...), whose count is saved"
MOST: Final = 5_000  # functions and classes
Receivers = list[tuple[Callable[..., Any], Subscription]]
Connections = list[tuple[type[Event], Receivers]]
Chains = dict[type[Event], tuple[Callable[..., Any], ...]]
CALLED: Final = frozenset({FunctionType, MethodType, partial})
WRAPPERS: Final = (staticmethod, classmethod)
BITS: Final = 63  # of a whole number: what `torch.load` reads safely


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


class Variable(NamedTuple):
    """A variable.

    Attributes:
        key: the id of the object that holds it, and its name or number there.
        where: a description of where it is.
        value: its value.
        is_default: whether it is a default argument; only such lists are compared, since others are logs.
    """

    key: tuple[int, str | int]
    where: str
    value: Any
    is_default: bool = False


def connections(run: Run, without: Chains | None = None) -> Connections:
    """Return what listens to each event, in order, where any of it is the user's; looked at once for a save.

    Args:
        run: the run.
        without: the chains in which nothing was the user's, by their events; those that are the same are not looked at
            again. They are kept here, so that no other chain can be taken for one of them.
    """
    found, known = Connections(), {} if without is None else without
    for signal in run.bus.signals():
        if signal.subscriptions and known.get(signal.event) is not signal.chain:
            known.pop(signal.event, None)
            chain, listeners = signal.chain, list(signal.listeners())
            if any(_is_of_users(receiver) for receiver, _ in listeners):
                found.append((signal.event, listeners))
            else:
                known[signal.event] = chain
    return found


def _is_of_users(receiver: Callable[..., Any]) -> bool:
    """Return whether a receiver is the user's, or a method of an object of a class of the user's."""
    while isinstance(receiver, partial):
        receiver = receiver.func
    holder = receiver.__self__ if isinstance(receiver, MethodType) else receiver
    kinds = (receiver, holder, type(holder))
    return any(is_users(str(module)) for each in kinds if (module := getattr(each, "__module__", None)) is not None)


def find_numbers(run: Run, connected: Connections | None = None) -> dict[str, dict[str, Any]]:
    """Return the numbers that the user's functions and classes can read and change, encoded, by where they are.

    Searched are the methods of the task, its modules, optimizers, schedulers and plugins, the functions and objects
    that listen to events, and all that these refer to. Lists and other objects are left out, since most of them are
    logs; a list, dict or set that is a default argument is not.

    Args:
        run: the run.
        connected: what listens, if that is known.
    """
    connected = connections(run) if connected is None else connected
    receivers = [each for _, listeners in connected for each in listeners]
    pending, seen = deque[Any](_roots(run, receivers)), set[int]()
    found = {variable.key: variable for variable in _object_variables(run, receivers) if is_number(variable.value)}
    while pending and len(seen) < MOST:
        thing = pending.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        for variable in _class_variables(thing) if isinstance(thing, type) else _function_variables(thing):
            pending += _functions_in(variable.value)
            if is_number(variable.value) or (variable.is_default and isinstance(variable.value, list | dict | set)):
                found[variable.key] = variable
    return _encode_by_name(found.values())


def is_number(value: Any) -> bool:
    """Return whether a value is a number that can be saved, or None, which may replace one."""
    kind = type(value)
    return kind in (bool, float, type(None)) or (kind is int and value.bit_length() <= BITS)


def receiver_object(run: Run, receiver: Callable[..., Any]) -> Any:
    """Return the user's object that is called, or whose method is; None for a function or an object with a state."""
    while isinstance(receiver, partial):
        receiver = receiver.func
    holder = receiver.__self__ if isinstance(receiver, MethodType) else receiver
    if isinstance(holder, FunctionType | type | nn.Module) or not is_users(type(holder).__module__):
        return None
    compared = (run.task, *run.optimizers.values(), *run.schedulers.values(), *run.plugins)
    return None if any(holder is each for each in compared) else holder


def _roots(run: Run, receivers: Receivers) -> Iterator[Any]:
    """Yield the user's classes and functions that a run calls."""
    for each in _objects(run):
        if is_users(type(each).__module__):
            yield type(each)
        for value in attributes_of(each).values():
            if type(value) in CALLED:
                yield from _functions_in(value)
    plugins = dict(zip(run.plugins.names(), run.plugins, strict=True))
    for receiver, subscription in receivers:
        owner = subscription.owner
        if owner not in plugins or isinstance(owner, FunctionName) or affects_training(plugins[owner]):
            yield from _functions_in(receiver)
            if (holder := receiver_object(run, receiver)) is not None:
                yield type(holder)


def _objects(run: Run) -> Iterator[Any]:
    """Yield the objects whose attributes are compared."""
    yield run.task
    for module in run.modules.values():
        yield from module.modules()
    yield from run.optimizers.values()
    yield from run.schedulers.values()
    yield from filter(affects_training, run.plugins)


def _object_variables(run: Run, receivers: Receivers) -> Iterator[Variable]:
    """Yield the attributes of objects that listen, or whose methods do, and that no plugin connected."""
    for receiver, subscription in receivers:
        if isinstance(subscription.owner, FunctionName) and (holder := receiver_object(run, receiver)) is not None:
            ignored, kind = ignored_names(holder), type(holder)
            for name, value in attributes_of(holder).items():
                if name not in ignored:
                    yield Variable((id(holder), name), f"{name} of a {kind.__module__}.{kind.__qualname__}", value)


def _class_variables(kind: type) -> Iterator[Variable]:
    bases = [base for base in type.mro(kind) if type(base.__module__) is str and is_users(base.__module__)]
    ignored = next((names for base in bases if (names := vars(base).get("resume_ignores"))), ())
    for base in bases:
        for name, value in list(vars(base).items()):
            is_pythons = name.startswith("__") and name.endswith("__") and not isinstance(value, FunctionType)
            if not is_pythons and name not in ignored:
                yield Variable((id(base), name), f"{base.__module__}.{base.__qualname__}.{name}", value)


def _function_variables(function: FunctionType) -> Iterator[Variable]:
    name, space = f"{function.__module__}.{function.__qualname__}", function.__globals__
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from _cell_variables(f"{variable} in {name}", cell)
    defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
    for key, value in defaults.items():
        yield Variable((id(function), f"default {key}"), f"default {key} of {name}", value, is_default=True)
    for key, value in vars(function).items():
        yield Variable((id(function), key), f"{name}.{key}", value)
    for key in global_names(function):
        if key in space:
            yield Variable((id(space), key), f"the global {key} of {function.__module__}", space[key])


def _cell_variables(where: str, cell: CellType) -> Iterator[Variable]:
    try:
        yield Variable((id(cell), 0), where, cell.cell_contents)
    except ValueError:  # not filled yet
        return


def _functions_in(value: Any) -> Iterator[Any]:
    """Yield the user's function or class that a value is, or wraps."""
    value = unwrapped(value)
    kind = type(value)
    found: tuple[Any, ...] = ()
    if _is_code(kind):
        found = (value,)
    elif kind is MethodType:
        found = value.__func__, value.__self__ if isinstance(value.__self__, type) else type(value.__self__)
    elif issubclass(kind, WRAPPERS):
        found = (value.__func__,)
    elif kind is property:
        found = value.fget, value.fset
    elif kind is partial:
        found = (value.func,)
    for each in found:
        if _is_code(type(each)) and type(each.__module__) is str and is_users(each.__module__):
            yield each


def _is_code(kind: type) -> bool:
    """Return whether objects of a type are functions or classes."""
    return kind is FunctionType or issubclass(kind, type)


def _encode_by_name(variables: Iterable[Variable]) -> dict[str, dict[str, Any]]:
    """Return encoded values by where they are; a number is added where several have one name, as closures may."""
    found: dict[str, dict[str, Any]] = {}
    for variable in variables:
        where, number = variable.where, 1
        while where in found:
            number += 1
            where = f"{variable.where} ({number})"
        found[where] = encode(variable.value)
    return found
