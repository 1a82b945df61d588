"""What the user's code reads beside its objects: globals, attributes of classes, what functions close over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from torch import Tensor, nn

from ..data.users_code import global_names, is_users
from .attributes import Part
from .program import affects_training

if TYPE_CHECKING:
    from ..context import RunContext

MOST: Final = 5_000  # functions and classes
LONG: Final = 10_000  # items of a container, above which it is taken for data
LARGE: Final = 2**20  # bytes of a tensor, likewise
Variable = tuple[int, str | int]  # of what it is a variable, and which


class Item(NamedTuple):
    """A variable.

    Attributes:
        variable: which one.
        where: it is, in words.
        value: that it has.
        set: gives it another.
    """

    variable: Variable
    where: str
    value: Any
    set: Callable[[Any], None]


def reached(run: RunContext) -> dict[str, Part]:
    """Return what the user's functions and classes read and could change, by where it is.

    These are the methods of the task, its modules, optimizers, schedulers and plugins, the functions that listen to
    events, and what all of these name. Data are left out, and what is compared as an object of the run.
    """
    own = {id(each) for each in _objects(run)}
    pending, seen, found = deque[Any](_roots(run)), set[int](), dict[Variable, Item]()
    while pending and len(seen) < MOST:
        thing = pending.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        for item in _of_class(thing) if isinstance(thing, type) else _of_function(thing):
            if (code := _code(item.value)) is not None:
                pending.append(code)
            elif id(item.value) not in own and _is_state(item.value):
                found[item.variable] = item
    return _named(found.values())


def _roots(run: RunContext) -> Iterator[Any]:
    """Yield the user's classes and functions that a run calls."""
    for each in _objects(run):
        for value in (each, *getattr(each, "__dict__", {}).values()):
            if (code := _code(value)) is not None:
                yield code
            elif is_users(type(value).__module__):
                yield type(value)
    plugins = {name: run.plugins[name] for name in run.plugins.names()}
    for signal in run.bus.signals():
        for receiver, owner in signal.listeners():
            may_change = owner not in plugins or affects_training(plugins[owner])
            if may_change and (code := _code(receiver)) is not None:
                yield code


def _objects(run: RunContext) -> Iterator[Any]:
    """Yield the objects whose attributes are compared."""
    yield run.task
    for module in run.modules.values():
        yield from module.modules()
    yield from run.optimizers.values()
    yield from run.schedulers.values()
    yield from (plugin for name in run.plugins.names() if affects_training(plugin := run.plugins[name]))


def _of_class(kind: type) -> Iterator[Item]:
    ignored = getattr(kind, "resume_ignores", ())
    for base in kind.__mro__:
        if is_users(base.__module__):
            for name, value in list(vars(base).items()):
                is_pythons = name.startswith("__") and name.endswith("__") and not isinstance(value, FunctionType)
                if not is_pythons and name not in ignored:
                    yield Item((id(base), name), f"{base.__qualname__}.{name}", value, partial(setattr, base, name))


def _of_function(function: FunctionType) -> Iterator[Item]:
    name, space = function.__qualname__, function.__globals__
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from _in_cell(f"{variable} in {name}", cell)
    for number, value in enumerate(function.__defaults__ or ()):
        yield Item(
            (id(function), number), f"default {number} of {name}", value, partial(_set_default, function, number)
        )
    defaults: dict[str, Any] = function.__kwdefaults__ or {}
    for variable, value in defaults.items():
        where = f"default {variable} of {name}"
        yield Item((id(defaults), variable), where, value, partial(defaults.__setitem__, variable))
    for variable, value in vars(function).items():
        yield Item((id(function), variable), f"{name}.{variable}", value, partial(setattr, function, variable))
    for variable in global_names(function):
        if variable in space:
            where = f"the global {variable} of {function.__module__}"
            yield Item((id(space), variable), where, space[variable], partial(space.__setitem__, variable))


def _set_default(function: FunctionType, number: int, value: Any) -> None:
    defaults = function.__defaults__ or ()
    function.__defaults__ = (*defaults[:number], value, *defaults[number + 1 :])


def _in_cell(where: str, cell: CellType) -> Iterator[Item]:
    try:
        yield Item((id(cell), 0), where, cell.cell_contents, partial(setattr, cell, "cell_contents"))
    except ValueError:  # not filled yet
        return


def _code(value: Any) -> Any:
    """Return the user's function or class in a value, None where it is neither."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, partial):
        value = value.func
    is_code = isinstance(value, FunctionType | type) and is_users(value.__module__ or "")
    return value if is_code else None


def _is_state(value: Any) -> bool:
    """Return whether a value may be state: no code, no module, nor data."""
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes <= LARGE
    if isinstance(value, list | tuple | dict | set | frozenset | deque):
        return len(value) <= LONG
    is_code = isinstance(value, ModuleType | FunctionType | MethodType | type | property | staticmethod | classmethod)
    return not (is_code or callable(value) or hasattr(type(value), "__get__") or isinstance(value, nn.Module))


def _named(items: Iterable[Item]) -> dict[str, Part]:
    """Return variables by where they are, with a number where several are called alike, as functions may be."""
    found: dict[str, Part] = {}
    for item in items:
        where, number = item.where, 1
        while where in found:
            number += 1
            where = f"{item.where} ({number})"
        found[where] = Part(item.value, item.set)
    return found
