"""Numbers that the user's code counts in beside its objects: globals, attributes of classes, closures, defaults."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ....events import Run, SavePoint
from ....events.bus import FunctionName, Handle, Subscription
from ....events.guarantee import Guarantee
from ...data.draws.users_code import attributes_of, global_names, is_users
from .attributes import MISSING, encode, equal, ignored_names, package_of, shown_apart

MOST: Final = 5_000  # functions and classes
CALLED: Final = frozenset({FunctionType, MethodType, partial})
BITS: Final = 63  # of a whole number: what `torch.load` reads safely


class Variable(NamedTuple):
    """A variable.

    Attributes:
        key: of what it is a variable, and which.
        where: it is, in words.
        value: that it has.
        is_default: whether it is a default argument: a list there that changes is no log.
    """

    key: tuple[int, str | int]
    where: str
    value: Any
    is_default: bool = False


def numbers(run: Run) -> dict[str, dict[str, Any]]:
    """Return the numbers that the user's functions and classes read and could change, encoded, by where they are.

    These are the methods of the task, its modules, optimizers, schedulers and plugins, the functions and objects that
    listen to events, and what all of these name. Lists and other objects are left out, since most of them are logs; but
    not a list, dict or set that is a default argument.
    """
    pending, seen = deque[Any](_roots(run)), set[int]()
    found = {variable.key: variable for variable in _of_objects(run) if is_number(variable.value)}
    while pending and len(seen) < MOST:
        thing = pending.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        for variable in _of_class(thing) if isinstance(thing, type) else _of_function(thing):
            pending += _codes(variable.value)
            if is_number(variable.value) or (variable.is_default and isinstance(variable.value, list | dict | set)):
                found[variable.key] = variable
    return _named(found.values())


def is_number(value: Any) -> bool:
    """Return whether a value is a number that can be kept, or the None in the place of one."""
    kind = type(value)
    return kind in (bool, float, type(None)) or (kind is int and value.bit_length() <= BITS)


def held_by(run: Run, receiver: Callable[..., Any]) -> Any:
    """Return the user's object that is called, or whose method is; None for a function, and for what has a state."""
    while isinstance(receiver, partial):
        receiver = receiver.func
    holder = receiver.__self__ if isinstance(receiver, MethodType) else receiver
    if isinstance(holder, FunctionType | type | nn.Module) or not is_users(type(holder).__module__):
        return None
    plugins = (run.plugins[name] for name in run.plugins.names())
    compared = (run.task, *run.optimizers.values(), *run.schedulers.values(), *plugins)
    return None if any(holder is each for each in compared) else holder


def _roots(run: Run) -> Iterator[Any]:
    """Yield the user's classes and functions that a run calls."""
    for each in _objects(run):
        if is_users(type(each).__module__):
            yield type(each)
        for value in attributes_of(each).values():
            if type(value) in CALLED:
                yield from _codes(value)
    plugins = {name: run.plugins[name] for name in run.plugins.names()}
    for receiver, seat in _receivers(run):
        if seat.owner not in plugins or isinstance(seat.owner, FunctionName) or affects_training(plugins[seat.owner]):
            yield from _codes(receiver)
            if (holder := held_by(run, receiver)) is not None:
                yield type(holder)


def _receivers(run: Run) -> Iterator[tuple[Callable[..., Any], Subscription]]:
    for signal in run.bus.signals():
        yield from signal.listeners()


def _objects(run: Run) -> Iterator[Any]:
    """Yield the objects whose attributes are compared."""
    yield run.task
    for module in run.modules.values():
        yield from module.modules()
    yield from run.optimizers.values()
    yield from run.schedulers.values()
    yield from (plugin for name in run.plugins.names() if affects_training(plugin := run.plugins[name]))


def _of_objects(run: Run) -> Iterator[Variable]:
    """Yield what the objects hold that listen, or whose methods do, and that no plugin connected."""
    for receiver, seat in _receivers(run):
        if isinstance(seat.owner, FunctionName) and (holder := held_by(run, receiver)) is not None:
            ignored, kind = ignored_names(holder), type(holder)
            for name, value in attributes_of(holder).items():
                if name not in ignored:
                    yield Variable((id(holder), name), f"{name} of a {kind.__module__}.{kind.__qualname__}", value)


def _of_class(kind: type) -> Iterator[Variable]:
    bases = [base for base in type.mro(kind) if type(base.__module__) is str and is_users(base.__module__)]
    ignored = next((names for base in bases if (names := vars(base).get("resume_ignores"))), ())
    for base in bases:
        for name, value in list(vars(base).items()):
            is_pythons = name.startswith("__") and name.endswith("__") and not isinstance(value, FunctionType)
            if not is_pythons and name not in ignored:
                yield Variable((id(base), name), f"{base.__module__}.{base.__qualname__}.{name}", value)


def _of_function(function: FunctionType) -> Iterator[Variable]:
    name, space = f"{function.__module__}.{function.__qualname__}", function.__globals__
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from _in_cell(f"{variable} in {name}", cell)
    defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
    for key, value in defaults.items():
        yield Variable((id(function), f"default {key}"), f"default {key} of {name}", value, is_default=True)
    for key, value in vars(function).items():
        yield Variable((id(function), key), f"{name}.{key}", value)
    for key in global_names(function):
        if key in space:
            yield Variable((id(space), key), f"the global {key} of {function.__module__}", space[key])


def _in_cell(where: str, cell: CellType) -> Iterator[Variable]:
    try:
        yield Variable((id(cell), 0), where, cell.cell_contents)
    except ValueError:  # not filled yet
        return


def _codes(value: Any) -> Iterator[Any]:
    """Yield the user's functions and classes in a value, which is a function or a class, or wraps one."""
    kind = type(value)
    found: tuple[Any, ...] = ()
    if issubclass(kind, FunctionType | type):
        found = (value,)
    elif issubclass(kind, MethodType):
        found = value.__func__, value.__self__ if isinstance(value.__self__, type) else type(value.__self__)
    elif issubclass(kind, staticmethod | classmethod):
        found = (value.__func__,)
    elif kind is property:
        found = value.fget, value.fset
    elif kind is partial:
        found = (value.func,)
    for each in found:
        is_code = issubclass(type(each), FunctionType | type)
        if is_code and type(each.__module__) is str and is_users(each.__module__):
            yield each


def _named(variables: Iterable[Variable]) -> dict[str, dict[str, Any]]:
    """Return encoded values by where they are, with one more number where several are called alike, as closures may."""
    found: dict[str, dict[str, Any]] = {}
    for variable in variables:
        where, number = variable.where, 1
        while where in found:
            number += 1
            where = f"{variable.where} ({number})"
        found[where] = encode(variable.value)
    return found


Program = Mapping[str, Mapping[str, Any]]
WORDS: Final = {
    "precision": "the precision",
    "dtype": "torch's default dtype",
    "device": "the device",
    "engine": "the engine",
    "threads": "the number of torch's threads",
    "deterministic": "torch.use_deterministic_algorithms",
    "cudnn": "cuDNN's (deterministic, benchmark, allow_tf32)",
    "matmul": "torch's float32_matmul_precision",
}
MEND: Final = ": keep it in its state_dict, or set affects_training = False on a plugin that only looks"
EARLIER: Final = "a lane before PERSIST, or set affects_training = False on a plugin that only looks"
LISTENS: Final = {"opaque": "Handle"}  # what listens is compared itself
DECIDES: Final = ("precision", "dtype")  # the others change how numbers are rounded, at most


def program(run: Run) -> dict[str, dict[str, Any]]:
    """Return the settings and the plugins of a run as plain data."""
    engine = run.engine
    device = torch.device(str(engine.device))
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    cudnn = torch.backends.cudnn
    settings = {
        "precision": str(getattr(getattr(engine, "precision", None), "name", "unknown")),
        "dtype": str(torch.get_default_dtype()),
        "device": f"{device.type} {model}".strip(),
        "engine": type(engine).__name__,
        "ranks": engine.world_size,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": [cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32],
        "matmul": torch.get_float32_matmul_precision(),
    }
    return {"settings": settings, "plugins": {name: _plugin(run, name) for name in run.plugins.names()}}


def program_changes(before: Program, now: Program) -> Iterator[tuple[Guarantee, str]]:
    """Yield what of a program is not as it was, with what a resume is worth then.

    Args:
        before: as it was saved.
        now: as it is.
    """
    same_ranks = before["settings"]["ranks"] == now["settings"]["ranks"]  # else another engine is no news
    for name, value in now["settings"].items():
        was = before["settings"].get(name, value)
        if was != value and name in WORDS and (name != "engine" or same_ranks):
            yield "not exact" if name in DECIDES else "order-exact", f"{WORDS[name]} was {was} and is {value}"
    plugins, saved = now["plugins"], before["plugins"]
    for name in [name for name in saved if saved[name]["affects_training"] and name not in plugins]:
        yield "not exact", f"plugin {name!r} was there and is gone"
    for name in [name for name in plugins if plugins[name]["affects_training"]]:
        if name not in saved:
            yield "not exact", f"plugin {name!r} is new"
        else:
            yield from _plugin_changes(f"plugin {name!r}", saved[name], plugins[name])


def _plugin_changes(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[Guarantee, str]]:
    if before["class"] != now["class"]:
        yield "not exact", f"{what} was a {before['class']} and is a {now['class']}"
        return
    if before["enabled"] != now["enabled"]:
        yield "not exact", f"{what} was switched {'on' if before['enabled'] else 'off'} and is not"
    then, here = before["options"], now["options"]
    mend = "" if now["class"].startswith("heliograph.") else MEND
    for name in sorted({*then, *here}):
        one, other = then.get(name, MISSING), here.get(name, MISSING)
        if not equal(one, other):
            was, value = shown_apart(one, other)
            yield "not exact", f"{what} had {name} = {was} and has {value}{mend}"


def _plugin(run: Run, name: str) -> dict[str, Any]:
    plugin, plugins = run.plugins[name], run.plugins
    affects = affects_training(plugin)
    options = _options(plugin) if affects else {}
    kind = f"{type(plugin).__module__}.{type(plugin).__qualname__}"
    return {"class": kind, "affects_training": affects, "enabled": plugins.is_enabled(name), "options": options}


def affects_training(plugin: Any) -> bool:
    """Return whether a plugin can change the training: an observer never can."""
    return getattr(plugin, "policy", "critical") != "observer" and bool(getattr(plugin, "affects_training", True))


def doubt_late_listeners(run: Run, saver: str) -> None:
    """Doubt plugins that listen to `SavePoint` later than the one that saves: what they change there is not saved.

    Args:
        run: the run.
        saver: the name of the plugin that saves.
    """
    owners = [seat.owner for _, seat in run.bus.signal(SavePoint).listeners()]
    names = set(run.plugins.names())
    for name in dict.fromkeys(owners[owners.index(saver) + 1 :] if saver in owners else ()):
        plugin = run.plugins[name] if name in names else None
        if is_users(type(plugin).__module__) and affects_training(plugin) and has_state(plugin):
            reason = "after the state is saved, so what it changes there is lost at a resume"
            run.data.doubt("not exact", f"plugin {name!r} listens to SavePoint {reason}: let it listen in {EARLIER}")


def has_state(plugin: Any) -> bool:
    """Return whether a plugin has anything in its `state_dict` now."""
    return hasattr(plugin, "state_dict") and bool(plugin.state_dict())


def _options(plugin: Any) -> dict[str, Any]:
    """Return the attributes of a plugin, now that its state is loaded: of ours the public ones, of the user's all."""
    skip = {"name", *ignored_names(plugin)}
    names = [name for name in vars(plugin) if name not in skip and not (_is_ours(plugin) and name.startswith("_"))]
    package, values = package_of(plugin), {name: getattr(plugin, name) for name in names}
    return {
        name: LISTENS if isinstance(value, Handle) else encode(_plain(value), package=package)
        for name, value in values.items()
    }


def _plain(option: Any) -> Any:
    """Return an option of a class of ours as plain data: `Every(steps=100)` in its own words, others by attributes."""
    if not _is_ours(option):
        return option
    if any("__str__" in vars(kind) for kind in type(option).__mro__[:-1]):
        return str(option)
    return {name: value for name, value in getattr(option, "__dict__", {}).items() if not name.startswith("_")}


def _is_ours(thing: Any) -> bool:
    return not is_users(type(thing).__module__) and type(thing).__module__.startswith("heliograph.")


PARAMETERS: Final = ("params", "param_names")


def options_of(run: Run) -> dict[str, dict[str, Any]]:
    """Return the options of a run's optimizers and schedulers, before the training or a checkpoint changes them."""
    found: dict[str, Any] = {}
    for name, optimizer in run.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            place = name if len(optimizer.param_groups) == 1 else f"group {number} of {name}"
            found.update({f"{key} of {place}": each for key, each in group.items() if key not in PARAMETERS})
    for name, scheduler in run.schedulers.items():
        found.update({f"{key} of the scheduler of {name}": each for key, each in scheduler.state_dict().items()})
    return {where: encode(each) for where, each in found.items()}


def overridden(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence on each option that the program makes otherwise than the one that wrote a checkpoint.

    Args:
        before: the options of that program.
        now: those of this one.
    """
    for where in now.keys() & before.keys():
        if not equal(before[where], now[where]):
            was, value = shown_apart(before[where], now[where])
            yield f"{where} was {was} in the program, and is {value}: what the checkpoint holds is used"
