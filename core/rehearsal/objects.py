"""The contents of objects, at any depth, and of random generators: saved, and restored into the same objects."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import CellType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..data.draws import rng
from ..data.draws.generators import KINDS

PLAIN = frozenset({bool, int, float, complex, str, bytes, NoneType, type(Ellipsis), range, slice})
CLOSED = (type, ModuleType, Enum, np.generic)
OPEN = {"__main__", "collections", "types", "argparse"}  # of Python's library, whose objects are entered
MOST_OF_DATA = 1_000_000  # objects of the data
MISSING = object()
Restore = Callable[[], None]
LARGE = 2**20  # bytes of a tensor of the data, above which it is watched and not copied


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
        if kind.__dictoffset__ and isinstance(held := value.__dict__, dict):
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


class KeptTensors:
    """Tensors, with copies of their memory on the CPU.

    Attributes:
        changed: what was written to, and was not copied, in words; known when the rest is put back.
    """

    def __init__(self) -> None:
        self.changed: list[str] = []
        self._tensors: list[tuple[Tensor, Tensor, Tensor | None, bool]] = []
        self._memory: dict[tuple[str, int], tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._watched: list[tuple[Tensor, int]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def keep(self, tensor: Tensor, *, is_data: bool) -> Iterator[Any]:
        """Keep a tensor; yield what else belongs to it.

        Args:
            tensor: of any kind; the parts of a sharded one are kept, and of one without memory nothing is.
            is_data: whether it belongs to a dataset: a large one is not copied then.
        """
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from (getattr(tensor, name) for name in names)
        elif tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested:
            self._keep_memory(tensor, is_data=is_data)
        if tensor.is_leaf:
            self._tensors.append((tensor, tensor.data, tensor.grad, tensor.requires_grad))
            yield tensor.grad

    def keep_array(self, array: np.ndarray[Any, Any], *, is_data: bool) -> None:
        """Keep an array; not a large one of the data, nor what lies on a disk."""
        if isinstance(array, np.memmap) or not array.flags.writeable or (is_data and array.nbytes > LARGE):
            return
        self._arrays.append((array, array.copy()))

    def restore(self) -> None:
        """Put everything back, in place."""
        for tensor, data, grad, requires_grad in self._tensors:
            if not _is_same_memory(tensor.data, data):
                tensor.data = data
            if tensor.grad is not grad:
                tensor.grad = grad
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        for storage, copied in self._memory.values():
            if storage.nbytes() != copied.nbytes():
                storage.resize_(copied.nbytes())
            storage.copy_(copied)
        for array, before in self._arrays:
            array[...] = before
        for tensor, version in self._watched:
            if tensor._version != version:
                self.changed.append(f"a tensor of the data, {list(tensor.shape)}, was written to while it was read")

    def _keep_memory(self, tensor: Tensor, *, is_data: bool) -> None:
        storage = tensor.untyped_storage()
        if is_data and storage.nbytes() > LARGE:
            self._watched.append((tensor, tensor._version))
            return
        place = str(tensor.device), storage.data_ptr()
        if place[1] and place not in self._memory:
            copied = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            self._memory[place] = storage, copied.copy_(storage)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    if is_traceable_wrapper_subclass(one) or is_traceable_wrapper_subclass(other):
        return one is other
    same_kind = (one.dtype, one.device, one.shape, one.stride()) == (
        other.dtype,
        other.device,
        other.shape,
        other.stride(),
    )
    return same_kind and one.data_ptr() == other.data_ptr()


@dataclass(frozen=True, slots=True)
class Former:
    """What there was before.

    Attributes:
        objects: what the objects held.
        draws: the states of the global generators.
    """

    objects: KeptObjects
    draws: dict[str, Any]

    def restore(self) -> None:
        """Put it back; a Ctrl-C waits until that is done."""
        with _interrupts_postponed():
            self.objects.restore()
            rng.restore(self.draws)


@contextmanager
def restored(
    users: Iterable[Any], data: Iterable[Any] = (), ours: Iterable[Any] = (), leave: Iterable[Any] = ()
) -> Iterator[Former]:
    """Put everything back when this context is left, also by an exception; see `KeptObjects` for the arguments."""
    former = Former(KeptObjects(users, data, ours, leave), rng.capture())
    try:
        yield former
    finally:
        former.restore()


@contextmanager
def _interrupts_postponed() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    former = signal.signal(signal.SIGINT, lambda *received: came.append(received[0]))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if came:
        raise KeyboardInterrupt
