"""Save the contents of objects at any depth, and of random generators, and restore them in place."""

from __future__ import annotations

import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import chain
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType, NoneType
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..data import rng
from ..data.rng import KINDS
from ..data.users_code import cell_content

NOT_ENTERED: Final = (
    bool, int, float, complex, str, bytes, NoneType, type(Ellipsis), range, slice, type, ModuleType, Enum, np.generic,
)  # fmt: skip
CONTAINERS: Final[tuple[Any, ...]] = (OrderedDict, dict, list, deque, set, bytearray)
REFERENCES: Final[dict[type, tuple[str, ...]]] = {
    FunctionType: ("__closure__", "__defaults__", "__kwdefaults__", "__dict__"),
    MethodType: ("__self__", "__func__"),
    partial: ("func", "args", "keywords"),
}
OPEN: Final = {"__main__", "collections", "types", "argparse"}  # of the standard library; their objects are entered
MOST_OF_DATA: Final = 1_000_000  # objects of the data
LARGE: Final = 2**20  # bytes: a larger tensor of the data is only watched
MISSING: Final = object()


class KeptObjects:
    """The saved contents of objects and of all that they refer to, and the states of random generators.

    The walk enters containers, functions, closures, tensors, and objects of Python classes; of Python's standard
    library only containers, and no classes or modules. It starts with the data: large tensors and arrays in them are
    not copied, and at most a million objects are visited.

    Args:
        users: the user's objects, at which the walk starts.
        data: the loaders of the data.
        ours: objects of this package, which may refer to the user's.
        leave: objects that are not entered.

    Attributes:
        iterators: the kinds of the user's iterators: items read from them cannot be restored.
        is_cut: whether the data hold more objects than are saved.
        changed: messages on tensors that were written to but not copied; complete after `restore`.
    """

    def __init__(
        self, users: Iterable[Any], data: Iterable[Any] = (), ours: Iterable[Any] = (), leave: Iterable[Any] = ()
    ) -> None:
        self.is_cut = False
        self.changed: list[str] = []
        self._undo: list[Callable[[], object]] = [partial(rng.restore, rng.capture())]
        self._excluded = {id(item) for item in leave}
        self._objects_by_id: dict[int, Any] = {}  # kept alive, so that ids stay unique
        self._memory = set[tuple[str, int]]()
        self._walk(data, is_data=True)
        self._walk(users)
        kinds = {type(value) for value in self._objects_by_id.values() if _is_closed(type(value))}
        names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if hasattr(kind, "__next__"))
        self.iterators = {name.removeprefix("builtins.") for name in names}
        self._walk(ours)

    def found(self, kind: type) -> Iterator[Any]:
        yield from (item for item in self._objects_by_id.values() if isinstance(item, kind))

    def restore(self) -> None:
        """Restore everything."""
        for undo in self._undo:
            undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.restore()

    def _walk(self, roots: Iterable[Any], *, is_data: bool = False) -> None:
        stack, visited = list(roots), self._objects_by_id
        while stack:
            value = stack.pop()
            if isinstance(value, NOT_ENTERED) or id(value) in visited or id(value) in self._excluded:
                continue
            if is_data and len(visited) >= MOST_OF_DATA:
                self.is_cut = True
                return
            visited[id(value)] = value
            stack.extend(self._parts(value, is_data=is_data))

    def _parts(self, value: Any, *, is_data: bool) -> Iterable[Any]:
        """Return the parts of an object, after planning how its own content is restored."""
        for kind, names in REFERENCES.items():
            if isinstance(value, kind):
                return [getattr(value, name) for name in names]
        if isinstance(value, KINDS):
            if not isinstance(value, random.SystemRandom):
                self._undo.append(partial(rng.set_generator_state, value, rng.generator_state(value)))
            return ()
        if isinstance(value, CellType):
            content = cell_content(value)
            self._undo.append(partial(setattr, value, "cell_contents", content))
            return (content,)
        if isinstance(value, np.ndarray):
            is_copied = value.flags.writeable and not isinstance(value, np.memmap)
            if is_copied and not (is_data and value.nbytes > LARGE):
                self._undo.append(partial(np.copyto, value, value.copy()))
            return value.reshape(-1).tolist() if value.dtype.hasobject else ()
        parts: list[Any] = []
        if isinstance(value, Tensor):
            parts = self._keep_tensor(value, is_data=is_data)
        elif isinstance(value, CONTAINERS):
            parts = _content(value)
            self._undo.append(partial(_restore_content, value, parts))
        elif isinstance(value, tuple | frozenset):
            parts = list(value)
        return chain(parts, () if _is_closed(type(value)) else self._keep_attributes(value))

    def _keep_attributes(self, value: Any) -> list[Any]:
        kind = type(value)
        descriptors = [item for base in kind.__mro__ for item in vars(base).values()]
        slots = {slot: _read(value, slot) for slot in descriptors if isinstance(slot, MemberDescriptorType)}
        self._undo.append(partial(_restore_slots, value, slots))
        return [*slots.values(), value.__dict__ if kind.__dictoffset__ else None]

    def _keep_tensor(self, tensor: Tensor, *, is_data: bool) -> list[Any]:
        # returns the parts of a sharded tensor, and the gradient
        parts: list[Any] = []
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            parts = [getattr(tensor, name) for name in names]
        elif tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested:
            storage = tensor.untyped_storage()
            place = str(tensor.device), storage.data_ptr()
            if is_data and storage.nbytes() > LARGE:
                self._undo.append(partial(self._check_version, tensor, tensor._version))
            elif storage.data_ptr() and place not in self._memory:
                self._memory.add(place)
                copied = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
                self._undo.append(partial(_restore_memory, storage, copied.copy_(storage)))
        if tensor.is_leaf:
            self._undo.append(partial(_restore_tensor, tensor, tensor.data, tensor.grad, tensor.requires_grad))
            parts.append(tensor.grad)
        return parts

    def _check_version(self, tensor: Tensor, version: int) -> None:
        text = f"a tensor of the data, {list(tensor.shape)}, was modified during the rehearsal"
        if tensor._version != version and text not in self.changed:
            self.changed.append(text)


def _is_closed(kind: type) -> bool:
    root = kind.__module__.partition(".")[0]
    return (root in sys.stdlib_module_names and root not in OPEN) or issubclass(kind, _BaseDataLoaderIter)


def _content(value: Any) -> list[Any]:
    # of a dict, its keys and values by turns
    return list(chain.from_iterable(dict.items(value)) if isinstance(value, dict) else value)


def _restore_content(target: Any, content: list[Any]) -> None:
    now = _content(target)
    if len(now) == len(content) and all(map(operator.is_, now, content)):
        return
    base = next(kind for kind in CONTAINERS if isinstance(target, kind))
    base.clear(target)  # not by methods of the user's class
    if issubclass(base, dict):
        for key, value in zip(content[::2], content[1::2], strict=True):
            base.__setitem__(target, key, value)
    else:
        (base.update if base is set else base.extend)(target, content)


def _read(value: Any, slot: MemberDescriptorType) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # not set
        return MISSING


def _restore_slots(value: Any, slots: dict[MemberDescriptorType, Any]) -> None:
    for slot, before in slots.items():
        if before is not MISSING:
            slot.__set__(value, before)
        elif _read(value, slot) is not MISSING:
            slot.__delete__(value)


def _restore_tensor(tensor: Tensor, data: Tensor, grad: Tensor | None, requires_grad: bool) -> None:
    tensor.data, tensor.grad = data, grad
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _restore_memory(storage: torch.UntypedStorage, copied: torch.UntypedStorage) -> None:
    if storage.nbytes() != copied.nbytes():
        storage.resize_(copied.nbytes())
    storage.copy_(copied)
