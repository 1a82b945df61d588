"""One attribute: as itself where it is small and plain, so that it can be restored, else as a fingerprint."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from math import isnan
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .fingerprint import Fingerprint

LEAVES: Final = 100_000  # plain values in one attribute that are kept
FEW: Final = 100  # of what reads the data
TEXT: Final = 64 * 1024  # characters or bytes in one of them
BITS: Final = 2000
NUMBERS: Final = 65_536  # in a tensor
SCALARS: Final = (bool, int, float, type(None))
EXACT: Final = (bool, int, str, type(None))  # equal only to the same bits
SHOWN: Final = 60  # characters of a value in a sentence
NOT_SEEN: Final = frozenset({"opaque", "unseen"})
MISSING: Final = {"missing": True}
Value = Mapping[str, Any]


def encode(value: Any, *, is_data: bool = False, package: str = "") -> dict[str, Any]:
    """Return an attribute as plain data: `value`, or `digest` with `kind`, or `opaque`, or `unseen` with the reason.

    Args:
        value: of the attribute.
        is_data: whether it is of what reads the data: of what is large, only a sample is looked at.
        package: of the object that has the attribute, whose other classes are looked into even if it is installed.
    """
    if type(value) in SCALARS and not _is_long(value):
        return {"value": value}
    try:
        return {"value": _copy(value, [FEW if is_data else LEAVES])}
    except (TypeError, RecursionError):
        pass
    try:
        fingerprint, kind = Fingerprint(value, is_data=is_data, package=package), describe(value)
    except Exception as error:  # noqa: BLE001  # of any class of the user's; a save must not fail for it
        return {"unseen": f"could not be looked at ({type(error).__name__})", "kind": type(value).__name__}
    if fingerprint.unseen:
        return {"unseen": fingerprint.unseen, "kind": kind}
    if fingerprint.is_opaque:
        return {"opaque": type(value).__name__}
    return {"digest": fingerprint.digest, "kind": kind}


def equal(one: Value, other: Value) -> bool:
    """Return whether two encoded attributes are equal, to the last bit; what cannot be seen is equal to anything."""
    if "value" in one and "value" in other:
        return _same(one["value"], other["value"])
    if one.keys() & NOT_SEEN or other.keys() & NOT_SEEN:
        return True
    return one.get("digest") == other.get("digest") and one.keys() == other.keys()


def show(value: Value) -> str:
    """Return an encoded attribute in words."""
    if "value" not in value:
        return "not there" if value is MISSING else str(value.get("kind", value.get("opaque", "unknown")))
    plain = value["value"]
    text = describe(plain) if isinstance(plain, Tensor) and plain.numel() > 1 else repr(plain)
    return text if len(text) <= SHOWN else describe(plain)


def shown_apart(was: Value, value: Value) -> tuple[str, str]:
    """Return two encoded attributes that differ, in words that differ, too."""
    before, now = show(was), show(value)
    return before, now if now != before else "one with other values"


def describe(value: Any) -> str:
    """Return what kind of value it is, in words."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)}"
    name = type(value).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return f"{article} {name} of {len(value)}" if hasattr(value, "__len__") else f"{article} {name}"


def _copy(value: Any, left: list[int]) -> Any:
    """Return a copy of a plain value.

    Raises:
        TypeError: it is too large, or not plain.
    """
    left[0] -= 1
    if left[0] < 0:
        raise TypeError
    kind = type(value)
    if (kind in SCALARS and not _is_long(value)) or (kind in (str, bytes) and len(value) <= TEXT):
        return value
    if kind in (list, tuple):
        return kind(_copy(each, left) for each in value)
    if kind in (dict, OrderedDict, Counter):
        return kind({_copy(key, left): _copy(item, left) for key, item in value.items()})
    if kind is np.float64:
        return float(value)
    if kind is Tensor and _is_plain(value):
        return value.detach().clone()
    raise TypeError


def _is_plain(value: Tensor) -> bool:
    is_there = value.layout is torch.strided and not value.is_meta and not value.is_nested
    return is_there and value.numel() <= NUMBERS and not value.requires_grad


def _is_long(value: Any) -> bool:
    """Return whether a number is so long that `torch.load` does not read it safely."""
    return type(value) is int and value.bit_length() > BITS


def _same(one: Any, other: Any) -> bool:
    if one is other:  # as most are: small numbers, names
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in EXACT:
        return bool(one == other)
    if isinstance(one, Tensor):
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return same_kind and Fingerprint(one).digest == Fingerprint(other).digest
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other) or (isnan(one) and isnan(other))
    return bool(one == other)
