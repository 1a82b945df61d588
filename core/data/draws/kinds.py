"""What kinds of objects there are to a search for generators."""

from __future__ import annotations

import logging
import random
import threading
import types
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from .generators import KINDS
from .users_code import is_users, module_of

_PACKAGE: Final = __name__.partition(".")[0] + "."
_OURS: Final = tuple(_PACKAGE + room for room in ("core.data.", "demo.", "testing."))  # may be a part of a dataset
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
    is_loops = module.startswith(_PACKAGE) and not module.startswith(_OURS)
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
