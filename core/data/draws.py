"""Draws of loading: keyed by where a batch is, kept apart from the draws of training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b, shake_128
from itertools import count, islice
from struct import Struct
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType, ModuleType, NoneType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.random import bit_generator as _bit_generator
from numpy.random import mtrand

Generator: TypeAlias = np.random.Generator | np.random.RandomState | random.Random | torch.Generator

_SEEDS: Final = Struct("<QIQ16s")  # for python, NumPy, torch, and the seedless
_DEPTH: Final = 8  # a subset of a dataset with choices among composed transforms needs 7
_ITEMS: Final = 1000  # a longer list holds data, and generators only in a program that makes one for each sample
_OBJECTS: Final = 100_000  # that is some tens of milliseconds
_KINDS: Final = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_PLAIN: Final = frozenset({NoneType, bool, int, float, complex, str, bytes, bytearray, set, frozenset})
_OPAQUE: Final = (torch.Tensor, np.ndarray, np.generic, ModuleType, type)
_CONTAINERS: Final[dict[type, Callable[[Any], Iterator[Any]]]] = {
    dict: lambda held: iter(dict.values(held)),
    list: list.__iter__,  # not iter(): a subclass may load what it yields
    tuple: tuple.__iter__,
}


def digest(*key: int, size: int, purpose: bytes = b"") -> bytes:
    """Return `size` bytes (at most 64) that a key decides, the same on every machine; purposes draw apart."""
    return blake2b(b"%d," * len(key) % key, digest_size=size, person=purpose).digest()


def seed_all(*key: int) -> None:
    """Seed the CPU's global generators by a key: python, NumPy's legacy generator and torch.

    What NumPy takes from the operating system, for `np.random.default_rng()` without a seed say, is a function of
    the key from now on too, and numbers as often as it is asked for. CUDA generators are left alone.

    Args:
        key: integers of any size and sign.
    """
    python, numpy, pytorch, entropy = _SEEDS.unpack(digest(*key, size=_SEEDS.size))
    random.seed(python)
    np.random.seed(numpy)
    torch.default_generator.manual_seed(pytorch)  # torch.manual_seed also queues calls for CUDA: 70 times slower
    _set_entropy(_keyed(entropy))


def isolated(*, one_thread: bool = True) -> _Isolation:
    """Return a context that loading in the training process runs in; contexts may nest.

    It begins with any state, so seed inside it. On leaving, also by an exception, python, NumPy's legacy generator (the
    very bit generator that was there, and its cached normal number), torch's CPU generator and NumPy's source of
    entropy are as they were. CUDA generators are not kept, as loading runs on the CPU.

    Args:
        one_thread: let torch use one thread inside, as in a DataLoader's worker: sums depend on the number.
    """
    return _Isolation(one_thread)


def find_generators(holder: object) -> list[Generator]:
    """Return the generators that an object holds, each once, in an order that pickling does not change.

    Looked at are attributes, slots, generators on the class, dicts, lists and tuples (1000 items each), what functions
    close over, their defaults, partials and bound methods, to a depth of 8. Not looked at are sets (their order differs
    between processes), modules, arrays, tensors, and generators that cannot be seeded.
    """
    found: list[Generator] = []
    seen = {id(holder): holder}
    level = [holder]
    for _ in range(_DEPTH + 1):
        below = []
        for each in level:
            if isinstance(each, _KINDS):
                found += [each] if _can_be_seeded(each) else []
                continue
            for part in _parts(each):
                if type(part) not in _PLAIN and id(part) not in seen and len(seen) < _OBJECTS:
                    seen[id(part)] = part
                    below.append(part)
        level = below
    return found


def key_generators(generators: Sequence[Generator], *key: int) -> None:
    """Seed each generator by a key and its place in the sequence."""
    for place, generator in enumerate(generators):
        seed = int.from_bytes(digest(*key, place, size=16, purpose=b"held"), "little")
        if isinstance(generator, np.random.Generator):
            bits: Any = generator.bit_generator
            bits.__setstate__(type(bits)(seed).__getstate__())  # from NumPy 2 on also what `spawn` draws from
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed % 2**64)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(seed % 2**32)
        else:
            generator.seed(seed)


class _Isolation:
    """One use of `isolated()`.

    Saving NumPy's legacy generator by its state costs 50 us, nearly all of it for copying the words of the bit
    generator. Another bit generator is put in its place instead; then only the cached normal number must be kept.
    """

    __slots__ = ("bits", "entropy", "numpy", "one_thread", "python", "spare", "threads", "torch")

    def __init__(self, one_thread: bool) -> None:
        self.one_thread = one_thread

    def __enter__(self) -> None:
        self.python = random.getstate()
        self.torch = torch.default_generator.get_state()
        self.entropy = _entropy()
        self.bits = mtrand.get_bit_generator()
        self.numpy = _without_bits(partial(_LEGACY.get_state, legacy=False))
        self.spare = _SPARES.pop() if _SPARES else np.random.MT19937(0)
        mtrand.set_bit_generator(self.spare)
        self.threads = torch.get_num_threads() if self.one_thread else 1
        if self.threads > 1:
            torch.set_num_threads(1)

    def __exit__(self, *raised: object) -> None:
        if self.threads > 1:
            torch.set_num_threads(self.threads)
        mtrand.set_bit_generator(self.bits)
        _without_bits(partial(_LEGACY.set_state, self.numpy))
        _SPARES.append(self.spare)
        _set_entropy(self.entropy)
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)


class _NoBits:
    """Stands in for a bit generator while only the cached normal number is read or written."""

    @property
    def state(self) -> dict[str, Any]:
        return {"bit_generator": "MT19937", "state": {}}  # anew: RandomState adds its own to it

    @state.setter
    def state(self, value: Any) -> None:
        """Take nothing."""


_LEGACY: Final[Any] = mtrand._rand  # the generator behind np.random.rand and its like
_NO_BITS: Final = _NoBits()
_SPARES: Final[list[Any]] = []


def _without_bits(action: Callable[[], Any]) -> Any:
    bits = _LEGACY._bit_generator
    _LEGACY._bit_generator = _NO_BITS
    try:
        return action()
    finally:
        _LEGACY._bit_generator = bits


def _entropy() -> Any:
    return getattr(_bit_generator, "randbits", None)


def _set_entropy(source: Any) -> None:
    _bit_generator.randbits = source  # type: ignore[attr-defined]  # private: SEEDLESS_IS_KEYED says if it is there


def _keyed(key: bytes) -> Callable[[int], int]:
    draws = count()

    def randbits(bits: int) -> int:
        block = shake_128(key + b"%d" % next(draws)).digest(-(-bits // 8))
        return int.from_bytes(block, "little") >> (-bits % 8)

    return randbits


def _is_seedless_keyed() -> bool:
    before = _entropy()
    _set_entropy(_keyed(b""))
    try:
        return np.random.SeedSequence().entropy == _keyed(b"")(128)
    finally:
        _set_entropy(before)


SEEDLESS_IS_KEYED: Final = _is_seedless_keyed()
"""Whether `seed_all` decides what `np.random.default_rng()` draws; a private name of NumPy makes it so."""


def _can_be_seeded(generator: Generator) -> bool:
    if isinstance(generator, np.random.RandomState):
        return isinstance(generator._bit_generator, np.random.MT19937)
    return not isinstance(generator, random.SystemRandom)


def _parts(holder: Any) -> Iterator[object]:
    """Yield what an object holds directly."""
    if isinstance(holder, _OPAQUE):
        return
    if isinstance(holder, FunctionType):
        yield from _captured(holder)
    elif isinstance(holder, partial):
        yield from (holder.func, holder.args, holder.keywords)
    elif isinstance(holder, MethodType | BuiltinMethodType):
        yield holder.__self__
        yield getattr(holder, "__func__", None)
    else:
        for kind, items in _CONTAINERS.items():
            if isinstance(holder, kind):
                yield from islice(items(holder), _ITEMS)
        if type(holder) not in _CONTAINERS:
            yield from _attributes(holder)


def _captured(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _attributes(holder: object) -> Iterator[object]:
    yield from islice(getattr(holder, "__dict__", {}).values(), _ITEMS)
    for kind in type(holder).__mro__:
        has_slots = "__slots__" in vars(kind)
        for value in vars(kind).values():
            if isinstance(value, _KINDS):
                yield value
            elif has_slots and isinstance(value, MemberDescriptorType):
                yield _slot(value, holder)


def _slot(descriptor: MemberDescriptorType, holder: object) -> object:
    try:
        return descriptor.__get__(holder)
    except AttributeError:  # not set yet
        return None
