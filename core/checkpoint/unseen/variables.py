"""Numbers in the user's code outside of the compared objects: globals, class attributes, closures, defaults."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Final, NamedTuple

from torch import nn

from ....events import Event, Run
from ....events.bus import FunctionName, Subscription
from ...data.draws.users_code import attributes_of, global_names, is_users
from .attributes import ignored_names
from .program import affects_training
from .values import encode

MOST: Final = 5_000  # functions and classes
Receivers = list[tuple[Callable[..., Any], Subscription]]
Connections = list[tuple[type[Event], Receivers]]
Chains = dict[type[Event], tuple[Callable[..., Any], ...]]
CALLED: Final = frozenset({FunctionType, MethodType, partial})
WRAPPERS: Final = (staticmethod, classmethod)
BITS: Final = 63  # of a whole number: what `torch.load` reads safely


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
