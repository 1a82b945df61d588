"""Save the contents of objects at any depth, and of random generators, and restore them in place."""

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

from ..data import rng
from ..data.generators import KINDS

PLAIN = frozenset({bool, int, float, complex, str, bytes, NoneType, type(Ellipsis), range, slice})
NOT_ENTERED = (type, ModuleType, Enum, np.generic)
OPEN = {"__main__", "collections", "types", "argparse"}  # modules of the standard library whose objects are entered
MOST_OF_DATA = 1_000_000  # objects of the data
MISSING = object()
Restore = Callable[[], None]
LARGE = 2**20  # bytes: a larger tensor of the data is only watched


class KeptObjects:
    """The saved contents of objects and of all that they refer to, including closures and tensors.

    The walk enters containers, functions, and objects of Python classes; of Python's standard library only containers,
    and no classes or modules. It starts with the data: large tensors and arrays in them are not copied, and at most a
    million objects are visited.

    Args:
        users: the user's objects, at which the walk starts.
        data: the loaders of the data.
        ours: objects of this package, which may refer to the user's.
        leave: objects that are not entered.

    Attributes:
        iterators: the kinds of the user's iterators: items read from them cannot be restored.
        is_cut: whether the data hold more objects than are saved.
        tensors: the tensors and arrays.
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
        self._excluded = {id(item) for item in leave}
        self._objects_by_id: dict[int, Any] = {}  # kept alive, so that ids stay unique
        self._is_data = True
        self._walk(data)
        self._is_data = False
        self._walk(users)
        iterators = set(self.iterators)
        self._walk(ours)
        self.iterators = iterators

    def found(self, kind: type) -> Iterator[Any]:
        yield from (item for item in self._objects_by_id.values() if isinstance(item, kind))

    def restore(self) -> None:
        for undo in self._undo:
            undo()
        self.tensors.restore()

    def _walk(self, roots: Iterable[Any]) -> None:
        stack, visited = list(roots), self._objects_by_id
        while stack:
            value = stack.pop()
            if type(value) in PLAIN or id(value) in visited or id(value) in self._excluded:
                continue
            if self._is_data and len(visited) >= MOST_OF_DATA:
                self.is_cut = True
                return
            visited[id(value)] = value
            stack.extend(self._parts(value))

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, NOT_ENTERED):
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
        if kind.__dictoffset__ and isinstance(variables := value.__dict__, dict):
            items = list(variables.items())
            self._undo.append(partial(_restore_dict, variables, items))
            yield from (item for _, item in items)
        if slots := list(_slots(value)):
            self._undo.append(partial(_restore_slots, value, slots))
        yield from (item for _, item in slots if item is not MISSING)
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


def _restore_dict(target: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    now = list(dict.items(target))
    if len(now) == len(items) and all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True)):
        return
    base: Any = OrderedDict if isinstance(target, OrderedDict) else dict
    base.clear(target)
    for key, value in items:
        base.__setitem__(target, key, value)


def _restore_content(target: Any, content: list[Any]) -> None:
    if len(target) == len(content) and all(a is b for a, b in zip(target, content, strict=True)):
        return
    base: Any = next(kind for kind in (list, deque, set, bytearray) if isinstance(target, kind))
    base.clear(target)
    (base.update if base is set else base.extend)(target, content)


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
        changed: messages on tensors that were written to but not copied; complete after `restore`.
    """

    def __init__(self) -> None:
        self.changed: list[str] = []
        self._tensors: list[tuple[Tensor, Tensor, Tensor | None, bool]] = []
        self._memory: dict[tuple[str, int], tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._watched: list[tuple[Tensor, int]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def keep(self, tensor: Tensor, *, is_data: bool) -> Iterator[Any]:
        # yields the objects of the tensor: the parts of a sharded one, and its gradient
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from (getattr(tensor, name) for name in names)
        elif tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested:
            self._keep_memory(tensor, is_data=is_data)
        if tensor.is_leaf:
            self._tensors.append((tensor, tensor.data, tensor.grad, tensor.requires_grad))
            yield tensor.grad

    # neither large arrays of the data, nor arrays on a disk, are copied
    def keep_array(self, array: np.ndarray[Any, Any], *, is_data: bool) -> None:
        if isinstance(array, np.memmap) or not array.flags.writeable or (is_data and array.nbytes > LARGE):
            return
        self._arrays.append((array, array.copy()))

    def restore(self) -> None:
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
                self.changed.append(f"a tensor of the data, {list(tensor.shape)}, was modified during the rehearsal")

    def _keep_memory(self, tensor: Tensor, *, is_data: bool) -> None:
        storage = tensor.untyped_storage()
        if is_data and storage.nbytes() > LARGE:
            self._watched.append((tensor, tensor._version))
            return
        place = str(tensor.device), storage.data_ptr()
        if place[1] and place not in self._memory:
            copied = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            self._memory[place] = storage, copied.copy_(storage)


def _is_same_memory(first: Tensor, second: Tensor) -> bool:
    if is_traceable_wrapper_subclass(first) or is_traceable_wrapper_subclass(second):
        return first is second
    same_kind = (first.dtype, first.device, first.shape, first.stride()) == (
        second.dtype,
        second.device,
        second.shape,
        second.stride(),
    )
    return same_kind and first.data_ptr() == second.data_ptr()


@dataclass(frozen=True, slots=True)
class Former:
    """The saved contents of objects, and the states of the global random generators."""

    objects: KeptObjects
    draws: dict[str, Any]

    def restore(self) -> None:
        # Ctrl-C takes effect afterwards
        with _interrupts_postponed():
            self.objects.restore()
            rng.restore(self.draws)


@contextmanager
def restored(
    users: Iterable[Any], data: Iterable[Any] = (), ours: Iterable[Any] = (), leave: Iterable[Any] = ()
) -> Iterator[Former]:
    """Restore everything when this context ends, also by an exception; see `KeptObjects` for the arguments."""
    backup = Former(KeptObjects(users, data, ours, leave), rng.capture())
    try:
        yield backup
    finally:
        backup.restore()


@contextmanager
def _interrupts_postponed() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[int] = []
    previous_handler = signal.signal(signal.SIGINT, lambda *received: signals.append(received[0]))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    if signals:
        raise KeyboardInterrupt
