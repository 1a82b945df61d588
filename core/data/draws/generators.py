"""Seeding every random generator by a key, and keeping the draws of loading apart from those of training."""

from __future__ import annotations

import ctypes
import random
import sys
import sysconfig
from collections.abc import Sequence
from hashlib import blake2b, shake_128
from struct import Struct
from typing import Any, Final, TypeAlias, get_args

import numpy as np
import torch
from numpy.random import bit_generator as _bit_generator
from numpy.random import mtrand

Generator: TypeAlias = (
    np.random.Generator
    | np.random.RandomState
    | np.random.BitGenerator
    | np.random.SeedSequence
    | random.Random
    | torch.Generator
)

_SEEDS: Final = Struct("<QIQ16s")  # for python, NumPy, torch, and the seedless
KINDS: Final = get_args(Generator)


def digest(*key: int, size: int, purpose: bytes = b"") -> bytes:
    """Return `size` bytes (at most 64) that a key decides, the same on every machine; purposes draw apart."""
    return blake2b(b"%d," * len(key) % key, digest_size=size, person=purpose).digest()


class _Seeds:
    """The seeds of keys: those of positions that follow each other in even steps, for 32 of them at once.

    A digest that is made between two batches finds nothing of its code in the caches, and takes ten times as long.
    """

    def __init__(self) -> None:
        self._last: tuple[int, ...] = ()
        self._ahead: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def of(self, key: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the seeds of the generators in their order."""
        seeds = self._ahead.pop(key, None) or self._look_ahead(key)
        self._last = key
        return seeds

    def _look_ahead(self, key: tuple[int, ...]) -> tuple[Any, ...]:
        last, keys = self._last, [key]
        if len(key) == len(last) > 2 and key != last == (*key[:2], last[2], *key[3:]):
            begin, position, rest = key[:2], key[2], key[3:]
            step = position - last[2]
            keys += [(*begin, position + step * number, *rest) for number in range(1, _AHEAD)]
        self._ahead = {each: _SEEDS.unpack(digest(*each, size=_SEEDS.size)) for each in keys}
        return self._ahead.pop(key)


_AHEAD: Final = 32
_DRAWN: Final = _Seeds()


def seed_all(*key: int) -> None:
    """Seed the CPU's global generators by a key: python, NumPy's legacy generator and torch.

    What NumPy takes from the operating system, for `np.random.default_rng()` without a seed say, is a function of
    the key from now on too, and numbers as often as it is asked for. CUDA generators are left alone.

    Args:
        key: integers of any size and sign.
    """
    python, numpy, pytorch, entropy = _DRAWN.of(key)
    _SEED(_PYTHON, python)  # random.seed() looks at the type first, then does these two
    _PYTHON.gauss_next = None
    bits = mtrand.get_bit_generator()
    if type(bits) is not np.random.MT19937:  # the user has put it there
        bits = np.random.MT19937(0)
    bits._legacy_seeding(numpy)  # np.random.seed() takes a lock that costs as much, then does these two
    mtrand.set_bit_generator(bits)  # forgets the cached normal number
    _TORCH.manual_seed(pytorch)  # torch.manual_seed also queues calls for CUDA: 70 times slower
    _set_entropy(_Keyed(entropy))


def isolated(*, one_thread: bool = True) -> _Isolation:
    """Return a context that loading in the training process runs in; contexts may nest.

    It begins with any state, so seed inside it. On leaving, also by an exception, python, NumPy's legacy generator (the
    very bit generator that was there, and its cached normal number), torch's CPU generator and NumPy's source of
    entropy are as they were. CUDA generators are not kept, as loading runs on the CPU.

    Args:
        one_thread: let torch use one thread inside, as in a DataLoader's worker: sums depend on the number.
    """
    return _Isolation(one_thread)


def key_generators(generators: Sequence[Generator], *key: int) -> None:
    """Seed each generator by a key and its place in the sequence."""
    for place, generator in enumerate(generators):
        seed = int.from_bytes(digest(*key, place, size=16, purpose=b"held"), "little")
        if isinstance(generator, np.random.Generator):
            _key_bits(generator.bit_generator, seed)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed % 2**64)
        elif isinstance(generator, np.random.RandomState):
            _key_legacy(generator, seed)
        elif isinstance(generator, np.random.BitGenerator):
            _key_bits(generator, seed)
        elif isinstance(generator, np.random.SeedSequence):
            generator.__init__(seed, pool_size=generator.pool_size)  # type: ignore[misc]  # it has no other way
        else:
            generator.seed(seed)


def is_global(generator: Generator) -> bool:
    """Return whether `seed_all` seeds a generator."""
    return any(generator is each for each in (_PYTHON, _LEGACY, torch.default_generator))


def generator_states() -> list[Any]:
    """Return the states of the global generators, and how often NumPy asked for entropy; to be compared."""
    source = _entropy()
    asked = source.draws if isinstance(source, _Keyed) else None
    bits = mtrand.get_bit_generator().state
    return [random.getstate(), bits, _cached_normal(), torch.default_generator.get_state(), asked]


def _key_bits(bits: Any, seed: int) -> None:
    bits.__setstate__(type(bits)(seed).__getstate__())  # from NumPy 2 on also what `spawn` draws from


def _key_legacy(generator: np.random.RandomState, seed: int) -> None:
    bits = generator._bit_generator
    if isinstance(bits, np.random.MT19937):
        generator.seed(seed % 2**32)
    else:
        _key_bits(bits, seed)
        generator.set_state({**generator.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


class _Isolation:
    """One use of `isolated()`.

    Saving NumPy's legacy generator by its state costs 50 us, nearly all of it for copying the words of the bit
    generator. Another bit generator is put in its place instead; then only the cached normal number must be kept.
    """

    __slots__ = ("bits", "entropy", "numpy", "one_thread", "python", "spare", "threads", "torch")

    def __init__(self, one_thread: bool) -> None:
        self.one_thread = one_thread

    def __enter__(self) -> None:
        self.python = _STATE.save()
        self.torch = _TORCH.get_state()
        self.entropy = _entropy()
        self.bits, self.numpy = mtrand.get_bit_generator(), _cached_normal()
        self.spare = _SPARES.pop() if _SPARES else np.random.MT19937(0)
        mtrand.set_bit_generator(self.spare)
        self.threads = torch.get_num_threads() if self.one_thread else 1
        if self.threads > 1:
            torch.set_num_threads(1)

    def __exit__(self, *raised: object) -> None:
        if self.threads > 1:
            torch.set_num_threads(self.threads)
        mtrand.set_bit_generator(self.bits)  # forgets the cached normal number
        if self.numpy is not None:
            _cache_normal(self.numpy)
        _SPARES.append(self.spare)
        _set_entropy(self.entropy)
        _TORCH.set_state(self.torch)
        _STATE.restore(self.python)


class _NoBits:
    """Stands in for a bit generator while only the cached normal number is read or written."""

    __slots__ = ()

    @property
    def state(self) -> dict[str, Any]:
        return {"bit_generator": "MT19937", "state": {}}  # a new one: RandomState adds its own to it

    @state.setter
    def state(self, value: Any) -> None:
        """Take nothing."""


_PYTHON: Final[Any] = random._inst  # the generator of random.random and the like
_SEED: Final[Any] = random.Random.__base__.seed  # type: ignore[union-attr]  # in C
_LEGACY: Final[Any] = mtrand._rand  # the generator of np.random.rand and the like
_TORCH: Final = torch.default_generator
_NO_BITS: Final = _NoBits()
_SPARES: Final[list[Any]] = []


def _cached_normal() -> float | None:
    """Return the normal number that NumPy's legacy generator has in hand, if any."""
    bits, _LEGACY._bit_generator = _LEGACY._bit_generator, _NO_BITS
    try:
        state = _LEGACY.get_state(False)
    finally:
        _LEGACY._bit_generator = bits
    return state["gauss"] if state["has_gauss"] else None


def _cache_normal(number: float) -> None:
    bits, _LEGACY._bit_generator = _LEGACY._bit_generator, _NO_BITS
    try:
        _LEGACY.set_state({**_NO_BITS.state, "has_gauss": 1, "gauss": number})
    finally:
        _LEGACY._bit_generator = bits


class _Words:
    """Saves and restores python's global generator as the memory that it is: 30 times as fast as by its numbers."""

    __slots__ = ("_generator", "_memory")

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._memory = memoryview((ctypes.c_char * _RANDOM.size).from_address(id(generator) + _HEAD)).cast("B")

    def save(self) -> tuple[bytes, float | None]:
        """Return what it draws from, and the cached normal number."""
        return self._memory.tobytes(), self._generator.gauss_next

    def restore(self, state: tuple[bytes, float | None]) -> None:
        """Put it back."""
        self._memory[:], self._generator.gauss_next = state

    def is_right(self) -> bool:
        """Return whether these are the numbers that `getstate` gives."""
        index, *words = _RANDOM.unpack(self._memory)
        return bool((3, (*words, index), self._generator.gauss_next) == self._generator.getstate())


class _Numbers:
    """Does the same in the way that every interpreter has."""

    def __init__(self, generator: Any) -> None:
        self.save, self.restore = generator.getstate, generator.setstate


_RANDOM: Final = Struct("=i624I")  # in C: where in the words it is, and the words
_HEAD: Final = object.__basicsize__


def _is_memory_known() -> bool:
    """Return whether the state of a python generator lies in memory as expected; nothing beyond it is looked at."""
    base: Any = random.Random.__base__
    has_lock = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
    if not has_lock or type(_PYTHON) is not random.Random or base.__basicsize__ < _HEAD + _RANDOM.size:
        return False
    twin = random.Random(1)  # noqa: S311  # its numbers are only compared
    words, states = _Words(twin), []
    for number in (0, 1, 622, 1, 1, 700):  # at the end of the words, at their beginning, and between
        for _ in range(number):
            twin.getrandbits(32)
        if not words.is_right():
            return False
        states.append((words.save(), twin.getstate()))
    twin.gauss(0, 1)
    for state, expected in states:
        words.restore(state)
        if twin.getstate() != expected:
            return False
    return _Words(_PYTHON).is_right()


_STATE: Final = _Words(_PYTHON) if _is_memory_known() else _Numbers(_PYTHON)


def _entropy() -> Any:
    return getattr(_bit_generator, "randbits", None)


def _set_entropy(source: Any) -> None:
    _bit_generator.randbits = source  # type: ignore[attr-defined]  # private: SEEDLESS_IS_KEYED says if it is there


class _Keyed:
    """Replaces the entropy of the operating system."""

    __slots__ = ("draws", "key")

    def __init__(self, key: bytes) -> None:
        self.key, self.draws = key, 0

    def __call__(self, bits: int) -> int:
        block = shake_128(self.key + b"%d" % self.draws).digest(-(-bits // 8))
        self.draws += 1
        return int.from_bytes(block, "little") >> (-bits % 8)


def _is_seedless_keyed() -> bool:
    before = _entropy()
    _set_entropy(_Keyed(b""))
    try:
        return np.random.SeedSequence().entropy == _Keyed(b"")(128)
    finally:
        _set_entropy(before)


SEEDLESS_IS_KEYED: Final = _is_seedless_keyed()
"""Whether `seed_all` decides what `np.random.default_rng()` draws; a private name of NumPy makes it so."""
