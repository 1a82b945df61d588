"""What objects hold, however deep, kept and put back into the very same objects."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from functools import partial
from types import CellType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..data.draws import rng
from ..data.draws.generators import KINDS
from ..data.draws.users_code import attributes_of
from .tensors import KeptTensors

PLAIN = frozenset({bool, int, float, complex, str, bytes, NoneType, type(Ellipsis), range, slice})
CLOSED = (type, ModuleType, Enum, np.generic)
OPEN = {"__main__", "collections", "types", "argparse"}  # of Python's library, whose objects are entered
MOST_OF_DATA = 1_000_000  # objects of the data
MISSING = object()
Restore = Callable[[], None]


class KeptObjects:
    """Objects and all that they refer to: attributes, containers, closures, tensors, arrays, random generators.

    Entered are containers, functions, and objects that Python code defines; of Python's own library only containers,
    and no classes or modules. The data are entered first: of them, large tensors and arrays are not copied, and not
    more than a million objects are.

    Args:
        users: the user's own objects, where to begin.
        data: the loaders of the data.
        ours: objects of this package, which may refer to the user's.
        leave: objects that are not entered.

    Attributes:
        iterators: the kinds of the user's iterators: what is read of them cannot be put back.
        is_cut: whether the data hold more objects than are kept.
        tensors: the tensors and arrays among them.
    """

    def __init__(
        self,
        users: Iterable[Any],
        data: Iterable[Any] = (),
        ours: Iterable[Any] = (),
        leave: Iterable[Any] = (),
    ) -> None:
        self.iterators: set[str] = set()
        self.is_cut = False
        self.tensors = KeptTensors()
        self._undo: list[Restore] = []
        self._left = {id(each) for each in leave}
        self._held: dict[int, Any] = {}  # by id; kept alive, so that no id is used twice
        self._is_data = True
        self._walk(data)
        self._is_data = False
        self._walk(users)
        found = set(self.iterators)
        self._walk(ours)
        self.iterators = found

    def found(self, kind: type) -> Iterator[Any]:
        """Yield the objects of a class."""
        yield from (each for each in self._held.values() if isinstance(each, kind))

    def restore(self) -> None:
        """Put everything back, in place."""
        for undo in self._undo:
            undo()
        self.tensors.restore()

    def _walk(self, roots: Iterable[Any]) -> None:
        stack, held = list(roots), self._held
        while stack:
            value = stack.pop()
            if type(value) in PLAIN or id(value) in held or id(value) in self._left:
                continue
            if self._is_data and len(held) >= MOST_OF_DATA:
                self.is_cut = True
                return
            held[id(value)] = value
            stack.extend(self._parts(value))

    def _parts(self, value: Any) -> Iterator[Any]:
        """Keep what one object holds; yield it."""
        if isinstance(value, CLOSED):
            return
        if isinstance(value, KINDS):
            self._generator(value)
        elif isinstance(value, Tensor):
            yield from self.tensors.keep(value, is_data=self._is_data)
            yield from self._attributes(value)
        elif isinstance(value, np.ndarray):
            self.tensors.keep_array(value, is_data=self._is_data)
            yield from value.reshape(-1).tolist() if value.dtype.hasobject else ()
        elif isinstance(value, FunctionType):
            yield from (value.__closure__ or (), value.__defaults__, value.__kwdefaults__, value.__dict__)
        elif isinstance(value, MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, CellType):
            yield self._cell(value)
        elif isinstance(value, partial):
            yield from (value.func, value.args, value.keywords)
        else:
            yield from self._contents(value)
            yield from self._attributes(value)

    def _contents(self, value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            items = list(dict.items(value))
            self._undo.append(partial(_restore_dict, value, items))
            for pair in items:
                yield from pair
        elif isinstance(value, list | deque | set | bytearray):
            content = list(iter(value))
            self._undo.append(partial(_restore_content, value, content))
            yield from content
        elif isinstance(value, tuple | frozenset):
            yield from tuple(value)
        elif isinstance(value, MappingProxyType):
            yield from value.values()
        elif hasattr(type(value), "__next__") and _is_closed(type(value)):
            name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            self.iterators.add(name)

    def _attributes(self, value: Any) -> Iterator[Any]:
        kind = type(value)
        if _is_closed(kind):
            return
        held = attributes_of(value)
        if isinstance(held, dict):
            items = list(held.items())
            self._undo.append(partial(_restore_dict, held, items))
            yield from (each for _, each in items)
        if slots := list(_slots(value)):
            self._undo.append(partial(_restore_slots, value, slots))
        yield from (each for _, each in slots if each is not MISSING)
        self._undo.append(partial(_restore_class, value, kind))

    def _generator(self, value: Any) -> None:
        if not isinstance(value, random.SystemRandom):
            self._undo.append(partial(rng.set_generator_state, value, rng.generator_state(value)))

    def _cell(self, cell: CellType) -> Any:
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            return None
        self._undo.append(partial(setattr, cell, "cell_contents", content))
        return content


def _is_closed(kind: type) -> bool:
    """Return whether the objects of a class are not entered."""
    root = kind.__module__.partition(".")[0]
    return (root in sys.stdlib_module_names and root not in OPEN) or issubclass(kind, _BaseDataLoaderIter)


def _slots(value: Any) -> Iterator[tuple[Any, Any]]:
    for base in type(value).__mro__:
        for descriptor in vars(base).values():
            if isinstance(descriptor, MemberDescriptorType):
                try:
                    yield descriptor, descriptor.__get__(value)
                except AttributeError:  # not set
                    yield descriptor, MISSING


def _restore_dict(held: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    now = list(dict.items(held))
    if len(now) == len(items) and all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True)):
        return
    base: Any = OrderedDict if isinstance(held, OrderedDict) else dict
    base.clear(held)
    for key, value in items:
        base.__setitem__(held, key, value)


def _restore_content(held: Any, content: list[Any]) -> None:
    if len(held) == len(content) and all(a is b for a, b in zip(held, content, strict=True)):
        return
    base: Any = next(each for each in (list, deque, set, bytearray) if isinstance(held, each))
    base.clear(held)
    (base.update if base is set else base.extend)(held, content)


def _restore_slots(value: Any, slots: Collection[tuple[Any, Any]]) -> None:
    for descriptor, before in slots:
        try:
            now = descriptor.__get__(value)
        except AttributeError:
            now = MISSING
        if now is before:
            continue
        if before is MISSING:
            descriptor.__delete__(value)
        else:
            descriptor.__set__(value, before)


def _restore_class(value: Any, kind: type) -> None:
    if type(value) is not kind:
        value.__class__ = kind
