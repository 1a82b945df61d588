"""Values as plain data: a copy of what is small and plain, so that it can be restored, else a fingerprint."""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from hashlib import blake2b, sha256
from io import IOBase
from itertools import chain, islice
from math import isnan
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, GeneratorType, MemberDescriptorType, MethodType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from ...events.checks import PLAIN
from ..data.draws.users_code import attributes_of, is_users, unwrapped
from ..system.extras import kind_of

LEAVES: Final = 100_000  # plain values in one attribute that are copied
FEW: Final = 100  # of what is compared only, numbers of tensors too
TEXT: Final = 64 * 1024  # characters or bytes in one of them
BITS: Final = 2000
NUMBERS: Final = 65_536  # in a tensor
SCALARS: Final = (bool, int, float, type(None))
EXACT: Final = (bool, int, str, type(None))  # equal only to the same bits
SHOWN: Final = 60  # characters of a value in a sentence
NOT_SEEN: Final = frozenset({"opaque", "unseen"})
MISSING: Final = {"missing": True}
HEAVY: Final = 5_000  # microseconds that it takes at each save to look at an attribute: worth a note
Value = Mapping[str, Any]


def encode(value: Any, *, is_data: bool = False, is_kept: bool = True, package: str = "") -> dict[str, Any]:
    """Return an attribute as plain data: `value`, or `digest` with `kind`, or `opaque`, or `unseen` with the reason.

    Args:
        value: of the attribute.
        is_data: whether it belongs to a dataset or sampler: only a sample of large data is read.
        is_kept: whether it may be restored; else it is compared only, and the digest of what is not small is enough.
        package: the package of the attribute's holder, whose classes count as the user's even if it is installed.
    """
    if type(value) in SCALARS and not _is_long(value):
        return {"value": value}
    counted = _Counted(FEW if is_data else LEAVES)
    try:
        plain = _copy(value, counted)
    except (TypeError, RecursionError):
        pass
    else:
        if (is_kept and not is_data) or max(counted.values, counted.numbers) <= FEW:
            return {"value": _cloned(plain)}
        return {"digest": _digest(plain), "kind": describe(value)}
    try:
        fingerprint, kind = Fingerprint(value, is_data=is_data, package=package), describe(value)
    except Exception as error:  # noqa: BLE001  # the user's classes may raise anything; a save must not fail for it
        return {"unseen": f"could not be looked at ({type(error).__name__})", "kind": type(value).__name__}
    if fingerprint.unseen:
        return {"unseen": fingerprint.unseen, "kind": kind}
    if fingerprint.is_opaque:
        return {"opaque": type(value).__name__}
    return {"digest": fingerprint.digest, "kind": kind}


def equal(one: Value, other: Value) -> bool:
    """Return whether two encoded values are equal, bit for bit; one that cannot be inspected equals any other."""
    if "value" in one and "value" in other:
        return _same(one["value"], other["value"])
    if one.keys() & NOT_SEEN or other.keys() & NOT_SEEN:
        return True
    return one.get("digest") == other.get("digest") and one.keys() == other.keys()


def show(value: Value) -> str:
    """Return an encoded value as text."""
    if "value" not in value:
        return "not there" if value is MISSING else str(value.get("kind", value.get("opaque", "unknown")))
    plain = value["value"]
    text = describe(plain) if isinstance(plain, Tensor) and plain.numel() > 1 else repr(plain)
    return text if len(text) <= SHOWN else describe(plain)


def differing(before: Mapping[str, Value], now: Mapping[str, Value]) -> Iterator[tuple[str, Value, Value]]:
    """Yield the name, the former and the present value of what differs; `MISSING` where there is none."""
    for name in {**before, **now}:
        was, value = before.get(name, MISSING), now.get(name, MISSING)
        if not equal(was, value):
            yield name, was, value


def show_both(was: Value, value: Value) -> tuple[str, str]:
    """Return two different encoded values as two different texts."""
    before, now = show(was), show(value)
    return before, now if now != before else "one with other values"


def describe(value: Any) -> str:
    """Return the kind and size of a value as text."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)}"
    return f"{kind_of(value)} of {len(value)}" if hasattr(value, "__len__") else kind_of(value)


class _Counted:
    """What a plain value has been found to hold.

    Args:
        limit: how many values there may be.

    Attributes:
        values: the values.
        numbers: the numbers in tensors, the characters in texts and the bytes.
    """

    __slots__ = ("limit", "numbers", "values")

    def __init__(self, limit: int) -> None:
        self.limit, self.values, self.numbers = limit, 0, 0

    @property
    def weight(self) -> int:
        """About how many microseconds it takes to keep or digest them."""
        return self.values + self.numbers // 250


def _copy(value: Any, counted: _Counted) -> Any:
    """Return a copy of a plain value, with the same tensors.

    Raises:
        TypeError: it is too large, or not plain.
    """
    counted.values += 1
    if counted.values > counted.limit:
        raise TypeError
    kind = type(value)
    if kind in SCALARS and not _is_long(value):
        return value
    if kind in (str, bytes) and len(value) <= TEXT:
        counted.numbers += len(value)
        return value
    if kind in (list, tuple):
        return kind(_copy(each, counted) for each in value)
    if kind in (dict, OrderedDict, Counter):
        return kind({_copy(key, counted): _copy(item, counted) for key, item in value.items()})
    if kind is np.float64:
        return float(value)
    if kind is Tensor and _is_plain(value):
        counted.numbers += value.numel()
        return value.detach()
    raise TypeError


def _digest(plain: Any) -> str:
    """Return the digest of all of a plain value; SHA-256 takes a third of the time that others do on large tensors."""
    digested, left = sha256(), [plain]
    while left:
        value = left.pop()
        kind = type(value)
        items: list[Any] = []
        if kind in (list, tuple):
            items = list(value)
        elif kind in (dict, OrderedDict, Counter):
            items = [each for pair in value.items() for each in pair]
        if not PLAIN.issuperset(map(type, items)):
            digested.update(f"{kind.__name__} of {len(items)};".encode())
            left += reversed(items)
        elif kind is Tensor:
            digested.update(f"{value.dtype} {list(value.shape)};".encode())
            digested.update(_memory(value))
        else:  # of many values at once: one by one, most of the time goes into the calls
            text = f"{kind.__name__}:{value if kind in PLAIN else items!r};"
            digested.update(text.encode("utf-8", "surrogatepass"))
    return digested.hexdigest()


def _cloned(plain: Any) -> Any:
    """Return a plain value with its tensors as they are now."""
    kind = type(plain)
    if kind is Tensor:
        return plain.clone()
    if kind in (list, tuple):
        return kind(map(_cloned, plain))
    if kind in (dict, OrderedDict, Counter):
        return kind({key: _cloned(item) for key, item in plain.items()})
    return plain


def _is_plain(value: Tensor) -> bool:
    is_dense = value.layout is torch.strided and not value.is_meta and not value.is_nested
    return is_dense and value.numel() <= NUMBERS and not value.requires_grad


def _is_long(value: Any) -> bool:
    """Return whether a number has too many bits for `torch.load(weights_only=True)`."""
    return type(value) is int and value.bit_length() > BITS


def _same(one: Any, other: Any) -> bool:
    if one is other:  # most are: small numbers, names
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in EXACT:
        return bool(one == other)
    if isinstance(one, Tensor):
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return same_kind and tensor_bytes(one) == tensor_bytes(other)  # digesting both takes ten times as long
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other) or (isnan(one) and isnan(other))
    return bool(one == other)


NODES: Final = 200_000  # values read in one attribute, which takes about 0.2 s
DEPTH: Final = 12
BYTES: Final = 64 * 2**20  # of tensors and arrays in one attribute
SAMPLE: Final = 1000  # items of a container of data; numbers of a large array, twice
SAMPLE_BYTES: Final = 2**16
WRITTEN: Final = (bool, int, float, complex, str, bytes, bytearray, type(None))  # as Python writes them
NAMED: Final = (np.generic, np.dtype, torch.dtype, torch.device, torch.Size, Path, Enum, range, slice)
GENERATORS: Final = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
SCHEDULERS: Final = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
ITERATORS: Final = ("itertools", "builtins")  # whose iterators show their position


class Fingerprint:
    """The digest of a value, the same in every process.

    The user's own objects are read through their attributes and functions through their closures; of an object of an
    installed library only the class counts. Modules are compared on their own.

    Args:
        value: the value.
        is_data: whether it belongs to a dataset or sampler: only a sample of large data is read, and the states of
            generators do not count, since draws are keyed.
        package: a package whose objects count as the user's own although it is installed.

    Attributes:
        unseen: why the value cannot be compared; empty if all of it was read.
        is_opaque: whether nothing but its class can be read.
    """

    def __init__(self, value: Any, *, is_data: bool = False, package: str = "") -> None:
        self.unseen = ""
        self._hash, self._is_data, self._package = blake2b(digest_size=16), is_data, package
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []  # keeps temporary objects alive, so that no id is used twice
        self._left, self._bytes = NODES, SAMPLE_BYTES if is_data else BYTES
        self._names = self._walked = self._digested = 0
        self._add(value, 0)
        self.is_opaque = self._names == 1 and not self.unseen

    @property
    def digest(self) -> str:
        """The digest, in hexadecimal."""
        return self._hash.hexdigest()

    @property
    def weight(self) -> int:
        """About how many microseconds it takes: one for each value, and for each kilobyte."""
        return self._walked + self._digested // 1000

    def _stop(self) -> None:
        if not self._is_data:
            self.unseen = "it is too large to be compared"

    def _write(self, text: str) -> None:
        self._digested += len(text)
        self._hash.update(text.encode("utf-8", "surrogatepass"))

    def _add(self, value: Any, depth: int) -> None:
        self._left -= 1
        self._walked += 1
        if self._left < 0 or depth > DEPTH:
            self._stop()
            return
        if isinstance(value, (*WRITTEN, *NAMED)):
            self._names += 2
            self._write(f"{type(value).__name__}:{value!r};")
            return
        if (number := self._numbers.get(id(value))) is not None:
            self._write(f"seen {number};")
            return
        self._numbers[id(value)] = len(self._numbers)
        self._held.append(value)
        if not self._content(value, depth):
            self._names += 1
            self._write(f"a {type(value).__module__}.{type(value).__qualname__};")

    def _content(self, value: Any, depth: int) -> bool:
        """Add the content of a value; return whether any of it can be read."""
        value = unwrapped(value)
        if isinstance(value, Tensor) and value.grad_fn is not None:  # its graph belongs to this step, and is not state
            return False
        if isinstance(value, Tensor | np.ndarray):
            self._array(value, depth)
        elif isinstance(value, GENERATORS):
            self._each("generator", [] if self._is_data else [_state(value)], depth)
        elif isinstance(value, dict):
            pairs = chain.from_iterable(dict.items(value))
            self._each(f"{type(value).__name__} of {len(value)}", chain(pairs, _extra(value)), depth)
        elif isinstance(value, list | tuple | deque):
            items = list.__iter__(value) if isinstance(value, list) else iter(value)  # no code of a subclass
            self._each(f"{type(value).__name__} of {len(value)}", chain(items, _extra(value)), depth)
        elif isinstance(value, set | frozenset):
            each_one = partial(Fingerprint, is_data=self._is_data, package=self._package)
            digests = (each_one(each).digest for each in islice(value, NODES))
            self._walked += len(value)
            self._each(f"set of {len(value)}", sorted(digests), depth)
        elif isinstance(value, FunctionType | MethodType | partial | type | BuiltinFunctionType):
            self._code(value, depth)
        elif isinstance(value, GeneratorType):
            self.unseen = "the position of a generator function cannot be seen"
        elif isinstance(value, SCHEDULERS):
            self._each(type(value).__qualname__, [value.state_dict()], depth)
        elif type(value).__module__ in ITERATORS and hasattr(value, "__next__"):
            self._each(type(value).__name__, value.__reduce__(), depth)
        elif hasattr(value, "__next__") and not isinstance(value, IOBase):
            self.unseen = "the position of an iterator cannot be seen"
        else:
            return self._object(value, depth)
        return True

    def _code(self, value: Any, depth: int) -> None:
        if isinstance(value, FunctionType):
            is_own = self._is_users(value.__module__ or "")
            parts = [*_capture(value), value.__defaults__, value.__kwdefaults__] if is_own else []
            self._each(f"function {value.__module__}.{value.__qualname__}", parts, depth)
        elif isinstance(value, MethodType):
            self._each(f"method {value.__func__.__qualname__}", [value.__self__], depth)
        elif isinstance(value, partial):
            self._each("partial", [value.func, value.args, value.keywords], depth)
        else:
            self._each(f"{value.__module__}.{value.__qualname__}", (), depth)

    def _each(self, kind: str, items: Iterable[Any], depth: int) -> None:
        self._names += 2
        self._write(f"{kind}(")
        for item in islice(items, SAMPLE) if self._is_data else items:
            self._add(item, depth + 1)
            if self._left < 0:
                break
        self._write(")")

    def _object(self, value: Any, depth: int) -> bool:
        module = type(value).__module__
        if isinstance(value, nn.Module):
            return False
        if module.partition(".")[0] in sys.stdlib_module_names and not self._is_users(module):
            return self._pickled(value, depth)
        if not (self._is_users(module) or module.startswith("torch.distributions")):
            return False
        attributes = dict(_attributes(value))
        if attributes:
            self._each(f"{module}.{type(value).__qualname__}", attributes.items(), depth)
        return bool(attributes)

    def _pickled(self, value: Any, depth: int) -> bool:
        """Add what pickle would save of an object of Python's library; a lock, a file and the like have nothing."""
        try:
            kept = value.__reduce_ex__(4)
        except TypeError:
            return False
        self._each(type(value).__qualname__, [kept] if isinstance(kept, str) else kept[1:], depth)
        return True

    def _is_users(self, module: str) -> bool:
        return module.partition(".")[0] in (self._package, "__main__") or is_users(module)

    def _array(self, value: Tensor | np.ndarray[Any, Any], depth: int) -> None:
        self._names += 2
        self._write(f"{type(value).__name__} {value.dtype} {list(value.shape)};")
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            self._each("objects", value.reshape(-1).tolist(), depth)
            return
        if self._is_data and value.nbytes > SAMPLE_BYTES:
            self._sample(value)
            return
        self._bytes -= value.nbytes
        if self._bytes < 0:
            self._stop()
            return
        self._digested += value.nbytes
        if isinstance(value, np.ndarray):
            self._hash.update(np.ascontiguousarray(value).tobytes())
        else:
            self._hash.update(_memory(value))

    def _sample(self, value: Tensor | np.ndarray[Any, Any]) -> None:
        """Add the first values of large data, and values at equal distances."""
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or not value.is_contiguous():
                return
            flat = value.detach().reshape(-1)
            for part in (flat[:SAMPLE], flat[:: 1 + flat.numel() // SAMPLE]):
                self._hash.update(_memory(part))
        elif value.flags.c_contiguous:
            row = value.reshape(-1)
            for piece in (row[:SAMPLE], row[:: 1 + row.size // SAMPLE]):
                self._hash.update(np.ascontiguousarray(piece).tobytes())


def tensor_bytes(value: Tensor) -> bytes:
    """Return the bits of a tensor, whatever its device, layout and type."""
    return bytes(_memory(value))


def _memory(value: Tensor) -> memoryview:
    """Return the bits of a tensor; where they lie as they are to be read, its own memory."""
    dense = value.detach().cpu()
    dense = (dense if dense.layout is torch.strided else dense.to_dense()).resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data


def _capture(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            yield "empty"


def _extra(value: Any) -> Iterator[Any]:
    """Yield the attributes of a container of a class of the user."""
    return chain.from_iterable(attributes_of(value).items())


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from attributes_of(value).items()
    for kind in type(value).__mro__:
        for name, descriptor in vars(kind).items():
            if isinstance(descriptor, MemberDescriptorType):  # a slot
                with suppress(AttributeError):  # not set yet
                    yield name, descriptor.__get__(value)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state() if isinstance(generator, torch.Generator) else _python_state(generator)


def _python_state(generator: random.Random) -> Any:
    return None if isinstance(generator, random.SystemRandom) else generator.getstate()
