"""What batches and datasets of any kind hold: whether two are equal, or one was changed; how many samples."""

from __future__ import annotations

import dis
import logging
import pickle
import random
import threading
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ....events.errors import count
from ....plugins.first_party import is_first_party
from .generators import KINDS
from .users_code import is_users, module_of


def same(one: Any, other: Any) -> bool:
    """Return whether two nested values are equal, bit for bit where they are tensors or arrays."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and _bits(one) == _bits(other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
            return False
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return same(one.tolist(), other.tolist()) if one.dtype.hasobject else one.tobytes() == other.tobytes()
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is not type(other):
        return bool(one == other)
    if callable(getattr(type(one), "equals", None)):
        return bool(one.equals(other))
    try:
        equal = bool(one == other) or (one != one and other != other)
    except (RuntimeError, TypeError, ValueError):  # an equality of tensors within, that is neither true nor false
        equal = False
    if equal or (_compares(one) and not hasattr(one, "__dict__")):
        return equal
    own = getattr(one, "__dict__", None)
    return same(own, vars(other)) if own else _pickle(one) == _pickle(other)


def _compares(value: Any) -> bool:
    """Return whether something is equal to more than itself."""
    own: Any = type(value).__eq__
    return own is not object.__eq__


def _pickle(value: Any) -> bytes | None:
    """Return the bytes of what has nothing else to be compared by, None where it has none either."""
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001  # whatever its way to be copied does: then nothing is known to differ
        return None


def _bits(value: Tensor) -> tuple[Any, ...]:
    dense = value.detach().cpu().to_dense().contiguous()
    return value.dtype, tuple(value.shape), dense.reshape(-1).view(torch.uint8).numpy().tobytes()


_LONG: Final = 1000  # of a longer container only the length counts


_MANY: Final = 20_000  # parts that are looked at, the outermost first: some tens of milliseconds


_VALUES: Final = (type(None), bool, int, float, complex, str, bytes)


_WITHIN: Final = ("torch.utils.data",)


def outline(dataset: Any) -> bytes:
    """Return a digest of the plain values that a dataset has in its attributes, and in those of what it is made of.

    What `set_epoch` sets does not count: the copies get the epoch, too. Nor does what lies deep among much data.
    """
    found = blake2b(digest_size=16)
    seen: set[int] = set()
    level = [("", dataset)]
    while level and len(seen) < _MANY:
        below = []
        for name, each in level:
            if isinstance(each, _VALUES):
                found.update(f"{name}={each!r};".encode())
            elif id(each) not in seen:
                seen.add(id(each))
                below += _parts(name, each)
        level = below[:_MANY]
    return found.digest()


def _parts(name: str, holder: Any) -> list[tuple[str, Any]]:
    kind = type(holder)
    if kind in (list, tuple, dict):
        if len(holder) > _LONG:
            return [(name, len(holder))]
        items = holder.items() if kind is dict else enumerate(holder)
        return [(f"{name}.{key}", value) for key, value in items]
    module = module_of(kind)
    if not is_users(module) and not module.startswith(_WITHIN):
        return [(name, kind.__qualname__)]
    epochs = set_by_epoch(kind)
    return [(f"{name}.{key}", each) for key, each in getattr(holder, "__dict__", {}).items() if key not in epochs]


def set_by_epoch(kind: type) -> frozenset[str]:
    """Return the names of the attributes that the `set_epoch` of a class sets."""
    return _set_by(getattr(kind, "set_epoch", None))


@lru_cache(maxsize=256)
def _set_by(method: Any) -> frozenset[str]:
    code = getattr(method, "__code__", None)
    if code is None:
        return frozenset()
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")


_DATA: Final = ("heliograph.core.data.", "heliograph_recorder.demo.", "heliograph_testing.")  # may be part of a dataset
_LEAVES: Final = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, range, slice),
    *(torch.Tensor, torch.dtype, torch.device, torch.Size, np.generic, np.dtype),
    *(types.ModuleType, types.CodeType, types.FrameType, types.CellType, types.MappingProxyType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(logging.Logger, logging.Handler, threading.Thread),  # they lead to everything
)
_CODE: Final = (
    *(types.FunctionType, types.MethodType, types.BuiltinMethodType),
    *(partial, staticmethod, classmethod, property),
)
CONTAINERS: Final[dict[type, Callable[[Any], list[Any]]]] = {
    dict: lambda held: [*dict.keys(held), *dict.values(held)],
    list: lambda held: list(list.__iter__(held)),  # not iter(): a subclass may load what it yields
    tuple: lambda held: list(tuple.__iter__(held)),
    set: lambda held: list(set.__iter__(held)),
    frozenset: lambda held: list(frozenset.__iter__(held)),
    deque: lambda held: list(deque.__iter__(held)),
    np.ndarray: lambda held: held.ravel().tolist() if held.dtype.hasobject else [],
}


class Family(Enum):
    """What a search does with an object."""

    LEAF = auto()
    GENERATOR = auto()
    ODD = auto()  # a state that no key reaches
    SET = auto()
    ARRAY = auto()
    CLASS = auto()
    CODE = auto()
    HOLDER = auto()


class Shape(NamedTuple):
    """What is known of the objects of a type.

    Attributes:
        family: what to do with one.
        base: the container that it is, if it is one.
        slots: where it keeps attributes beside its dict.
        is_private: whether what it holds is a library's own affair.
    """

    family: Family
    base: type | None
    slots: tuple[Any, ...]
    is_private: bool


class _Shapes(dict[type, Shape]):
    """Of every type, worked out once."""

    def __missing__(self, kind: type) -> Shape:
        base = next((each for each in CONTAINERS if issubclass(kind, each)), None)
        classes = [vars(each) for each in kind.__mro__ if "__slots__" in vars(each)]
        slots = [each for own in classes for each in own.values() if isinstance(each, types.MemberDescriptorType)]
        family = _family_of(kind)
        is_private = family is Family.HOLDER and kind not in CONTAINERS and not is_users(module_of(kind))
        self[kind] = Shape(family, base, tuple(slots), is_private)
        return self[kind]


def _family_of(kind: type) -> Family:
    module = module_of(kind)
    iterates = module in ("builtins", "itertools") and hasattr(kind, "__next__")
    is_loops = is_first_party(module) and not module.startswith(_DATA)
    families: dict[Family, bool] = {
        Family.ODD: iterates or issubclass(kind, random.SystemRandom),
        Family.GENERATOR: issubclass(kind, KINDS),
        Family.LEAF: issubclass(kind, _LEAVES) or is_loops,
        Family.CLASS: issubclass(kind, type),
        Family.ARRAY: issubclass(kind, np.ndarray),
        Family.SET: issubclass(kind, set | frozenset),
        Family.CODE: issubclass(kind, _CODE),
    }
    return next((family for family, is_it in families.items() if is_it), Family.HOLDER)


SHAPES: Final = _Shapes()


_PLAIN: Final = (*_VALUES, np.generic, type, torch.nn.Module)  # hold no samples
_DECLARED: Final = ("batch_size", "num_graphs")  # by which objects say how many samples they hold
_DEPTH, _OBJECT = 8, 3  # how deep to look: into containers, and into other objects, which may lead to the whole program
_PARTS, _ITEMS = 64, 12  # how many parts of an object or mapping to look at, and of a list
_Get = Callable[[Any], Any]


def find_samples(batch: Any) -> tuple[int, list[_Get], str]:
    """Return the number of samples in a batch, what returns the tensors that show it, and why it is in doubt."""
    found = list(_sizes_in(batch))
    counts = Counter(size for size, _ in found)
    size = max(counts, key=counts.__getitem__) if counts else _number_of_items(batch)
    if len(counts) == 1:
        tensors = [get for _, get in found if get is not None]
        return size, tensors if len(tensors) == len(found) else [], ""
    why = "tensors of different first dimensions" if counts else "no tensor whose first dimension is the samples"
    doubt = f"A batch has {why}: {_shapes_in(batch):.400}. It counts as {count(size, 'sample', 'samples')}, by which "
    return size, [], f"{doubt}means are weighted: define batch_size(self, batch) in the task."


def _sizes_in(value: Any, depth: int = _DEPTH, get: _Get | None = None) -> Iterator[tuple[int, _Get | None]]:
    """Yield the first dimension of each tensor in a batch, and what returns it; the samples that an object declares."""
    if isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0]), None
    elif isinstance(value, Tensor) and value.is_nested:  # which may have no shape
        yield value.size(0), None
    elif isinstance(shape := getattr(value, "shape", None), tuple):
        yield from ((int(size), get or _itself) for size in shape[:1])
    elif sizes := [size for name in _DECLARED if isinstance(size := getattr(value, name, None), int)]:
        yield sizes[0], None
    elif isinstance(value, list) and value and all(isinstance(sample, Mapping | tuple) for sample in value):
        yield len(value), None  # default_collate makes lists only of tensors, lists and texts
    elif depth:
        depth = min(depth, _DEPTH if isinstance(value, list | tuple | Mapping) else _OBJECT) - 1
        for _, part, inner in _named_parts(value):
            if not isinstance(part, _PLAIN):
                yield from _sizes_in(part, depth, inner if get is None else _after(get, inner))


def _named_parts(value: Any) -> Iterator[tuple[Any, Any, _Get]]:
    """Yield the name of each part of a container or object, the part, and what returns it."""
    if isinstance(value, _PLAIN):
        return
    if isinstance(value, Mapping):
        yield from ((key, part, itemgetter(key)) for key, part in islice(value.items(), _PARTS))
    elif isinstance(value, list | tuple):
        yield from ((index, part, itemgetter(index)) for index, part in enumerate(value[:_ITEMS]))
    else:
        for name in islice(
            (*(slot.__name__ for slot in SHAPES[type(value)].slots), *getattr(value, "__dict__", ())), _PARTS
        ):
            if hasattr(value, name):
                yield name, getattr(value, name), attrgetter(name)


def _itself(batch: Any) -> Any:
    return batch


def _after(outer: _Get, inner: _Get) -> _Get:
    return lambda batch: inner(outer(batch))


def _number_of_items(batch: Any) -> int:
    """Return the length of the first list of numbers or texts in a batch; 1 if it has none."""
    if isinstance(batch, list | tuple) and (not batch or isinstance(batch[0], _PLAIN)):
        return len(batch)
    return next((_number_of_items(part) for _, part, _ in _named_parts(batch)), 1)


def _shapes_in(value: Any, depth: int = 3) -> str:
    """Return the names and shapes in a batch, in a few words."""
    shape = () if isinstance(value, Tensor) and value.is_nested else getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return str(list(shape))
    names = [
        ("" if isinstance(value, list | tuple) else f"{name}: ") + _shapes_in(part, depth - 1)
        for name, part, _ in islice(_named_parts(value), _PARTS if depth else 0)
    ]
    return type(value).__name__ + f"({', '.join(names)})" * bool(names)
