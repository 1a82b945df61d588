"""The parts of an object: attributes, slots, and references of the user's classes and functions."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from types import CellType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, Final

from ...objects.equality import SCALARS
from .generators import KINDS
from .users_code import is_users, module_of

MAKING: Final = ("__init__", "__new__", "__post_init__", "__setstate__", "__del__")  # these do not run during loading
VALUES: Final = tuple(SCALARS)
MOST_ITEMS: Final = 1000  # of a longer container only the length enters the digest
MOST_PARTS: Final = 20_000  # in the digest, the outermost first: some tens of milliseconds


def slot_names(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (
            (names,) if isinstance(names, str) else sorted(names)
        ):  # the order of a set differs between processes
            if name not in ("__dict__", "__weakref__"):
                is_private = name[:2] == "__" and name[-2:] != "__"
                yield f"_{base.__name__.lstrip('_')}{name}" if is_private else name


def attributes(value: object) -> Iterator[tuple[str, object]]:
    # From `__dict__` and slots; no code of the class runs.
    kind = type(value)
    instance_dict = value.__dict__ if kind.__dictoffset__ else {}
    for name, item in list(instance_dict.items()):
        if not (name[:2] == "__" and name[-2:] == "__"):
            yield name, item
    for name in slot_names(kind):
        slot = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        if isinstance(slot, MemberDescriptorType):
            with suppress(AttributeError):  # not set yet
                yield name, slot.__get__(value)


def cell_content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def class_parts(kind: type) -> Iterator[object]:
    # The generators of any class; for the user's classes, also functions and variables.
    for base in kind.__mro__:
        is_own = is_users(module_of(base))
        for name, value in list(vars(base).items()):
            is_part = name[:2] != "__" or (isinstance(value, FunctionType) and name not in MAKING)
            if isinstance(value, KINDS) or (is_own and is_part):
                yield value


def function_parts(function: FunctionType) -> Iterator[object]:
    """Yield closure cells, defaults and attributes of a function; for user code, also the globals that it names.

    Names of attributes count too: a global of the same name is a part.
    """
    yield from map(cell_content, function.__closure__ or ())
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *function.__dict__.values())
    if is_users(str(function.__globals__.get("__name__"))):
        names, spaces = _names(function.__code__), [function.__globals__]
        for space in spaces:  # including the user's modules that it names or imports
            for name in names:
                value = space.get(name, sys.modules.get(name))
                if not isinstance(value, ModuleType):
                    yield value
                elif is_users(value.__name__) and not any(vars(value) is seen for seen in spaces):
                    spaces.append(vars(value))


def _names(code: CodeType) -> dict[str, None]:
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def set_by_epoch(kind: type) -> frozenset[str]:
    code = getattr(getattr(kind, "set_epoch", None), "__code__", None)
    steps = () if code is None else dis.get_instructions(code)
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")


def outline(dataset: object) -> bytes:
    """Return a digest of the plain values in a dataset's attributes and parts.

    Values that `set_epoch` sets are ignored, because every copy gets the epoch; so are values deep in large data.
    """
    content, seen, level = blake2b(digest_size=16), set[int](), [dataset]
    while level and len(seen) < MOST_PARTS:
        below: list[Any] = []
        for value in level:
            if isinstance(value, VALUES):
                content.update(f"{value!r};".encode())
            elif id(value) not in seen:
                seen.add(id(value))
                below += _outlined(value)
        level = below[:MOST_PARTS]
    return content.digest()


def _outlined(holder: Any) -> list[Any]:
    kind = type(holder)
    if kind in (list, tuple, dict):
        size = len(holder)
        items = [] if size > MOST_ITEMS else [*holder, *holder.values()] if kind is dict else holder
        return [size, *items]
    if not is_users(module_of(kind)) and not module_of(kind).startswith("torch.utils.data"):
        return [kind.__qualname__]
    by_epoch = set_by_epoch(kind)
    return [part for name, value in attributes(holder) if name not in by_epoch for part in (name, value)]
