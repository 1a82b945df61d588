"""Exceptions, carried from one process to another.

Pickling them as they are drops their causes, fails on attributes that cannot be pickled, and calls constructors whose
signature it does not know. So they are taken apart here, piece by piece, and put together without the user's code.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

Piece = tuple[bytes | None, str]  # pickled where that works, and as text
Name = tuple[str, str]  # a class's module and qualified name


@dataclass(frozen=True)
class Carried:
    """An exception as plain data.

    Attributes:
        kinds: its class and the bases of that which are exceptions too, in the order of inheritance.
        args: its arguments.
        state: its attributes, its notes included.
        text: its traceback and those of its causes, formatted.
        cause: what it was raised from.
        context: what was being handled when it was raised.
        suppresses: whether the context is not to be shown.
    """

    kinds: tuple[Name, ...]
    args: tuple[Piece, ...]
    state: dict[str, Piece]
    text: str
    cause: Carried | None
    context: Carried | None
    suppresses: bool


def carry(error: BaseException) -> Carried:
    """Return an exception as data that can always be pickled."""
    return _carry(error, set())


def _carry(error: BaseException, seen: set[int]) -> Carried:
    seen.add(id(error))  # a chain may bite its own tail
    kinds = [kind for kind in type(error).__mro__ if issubclass(kind, BaseException)]
    builtin: Any = _builtin(type(error))
    _, args, *state = builtin.__reduce__(error)
    cause, context = error.__cause__, error.__context__
    return Carried(
        kinds=tuple((kind.__module__, kind.__qualname__) for kind in kinds),
        args=tuple(_pack(value) for value in args),
        state={name: _pack(value) for attributes in state for name, value in attributes.items()},
        text="".join(traceback.format_exception(error)) if len(seen) == 1 else "",
        cause=_carry(cause, seen) if cause is not None and id(cause) not in seen else None,
        context=_carry(context, seen) if context is not None and id(context) not in seen else None,
        suppresses=error.__suppress_context__,
    )


def rebuild(carried: Carried) -> BaseException:
    """Return the exception: of its own type where this process can import it, else of a stand-in's.

    A stand-in has the type's name, and inherits from the first of its bases that can be imported. No `__init__` or
    `__new__` of the user's is called. What could not be pickled is there as text.
    """
    args = tuple(_unpack(piece) for piece in carried.args)
    state = {name: _unpack(piece) for name, piece in carried.state.items()}
    try:
        error = _make(_find(carried.kinds), args, state)
    except Exception:  # noqa: BLE001  # a class may refuse whatever it likes; its name and text still arrive
        error = _make(_stand_in(carried.kinds[0], Exception), args, state)
    error.__cause__ = None if carried.cause is None else rebuild(carried.cause)
    error.__context__ = None if carried.context is None else rebuild(carried.context)
    error.__suppress_context__ = carried.suppresses
    return error


def _make(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    base: Any = _builtin(kind)
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)
    for name, value in state.items():
        object.__setattr__(error, name, value)
    return error


def _find(kinds: Sequence[Name]) -> type[BaseException]:
    """Return the class, or a stand-in that inherits from the nearest base; BaseException is the last of them."""
    found = [_import(*name) for name in kinds]
    nearest = next(kind for kind in found if kind is not None)
    return nearest if found[0] is not None else _stand_in(kinds[0], nearest)


def _import(module: str, name: str) -> type[BaseException] | None:
    try:
        found = attrgetter(name)(import_module(module))
    except Exception:  # noqa: BLE001  # a module raises what it likes when it is imported
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _stand_in(name: Name, base: type[BaseException]) -> type[BaseException]:
    module, qualified = name
    body = {"__module__": module, "__qualname__": qualified, "__doc__": "Stands in for a class of another process."}
    return type(qualified.rpartition(".")[2], (base,), body)


def _builtin(kind: type[BaseException]) -> type[BaseException]:
    """Return the nearest base that is Python's own: it knows how to take its instances apart and to make them."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins" and issubclass(base, BaseException))


def _pack(value: Any) -> Piece:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  # the user's __repr__
        text = f"<{type(value).__qualname__}, whose repr raised {type(error).__name__}>"
    try:
        return pickle.dumps(value), text
    except Exception:  # noqa: BLE001  # the user's __reduce__
        return None, text


def _unpack(piece: Piece) -> Any:
    pickled, text = piece
    if pickled is None:
        return text
    try:
        return pickle.loads(pickled)  # noqa: S301  # from our own child
    except Exception:  # noqa: BLE001  # the user's __setstate__, or a class that is not to be found here
        return text
