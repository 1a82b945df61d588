"""Seeding of all random generators by a key, and isolation of loading from the training."""

from __future__ import annotations

import ctypes
import random
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b, shake_128
from struct import Struct
from typing import Any, Final, TypeAlias, get_args
from zlib import crc32

import numpy as np
import torch
from numpy.random import bit_generator as _bit_generator
from numpy.random import mtrand

PYTHON: Final[Any] = random._inst  # the generator of the functions in `random`
LEGACY: Final[Any] = mtrand._rand  # the generator of the functions in `np.random`
TORCH: Final[Any] = torch.default_generator

_RANDOM_LAYOUT: Final = Struct("=i624I")  # of Python's generator in C: the index, and the words
_HEAD: Final = object.__basicsize__


def python_memory(generator: random.Random) -> memoryview | None:
    """Return the index and words of a Python generator in memory, protected by the GIL only; None if unknown.

    `getstate` makes an object of each word, which takes four times as long as all else between two batches.
    """
    has_layout = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
    base: Any = random.Random.__base__
    if not has_layout or type(generator) is not random.Random or base.__basicsize__ < _HEAD + _RANDOM_LAYOUT.size:
        return None
    memory = memoryview((ctypes.c_char * _RANDOM_LAYOUT.size).from_address(id(generator) + _HEAD)).cast("B")
    index, *words = _RANDOM_LAYOUT.unpack(memory)
    return memory if generator.getstate()[1] == (*words, index) else None


class _WithoutWords:
    # In place of NumPy's legacy bit generator while the cached normal number is read or set, which copies its state.
    state = property(lambda _: dict(NO_NORMAL), lambda *_: None)


NO_NORMAL: Final[dict[str, Any]] = {"bit_generator": "MT19937", "state": {}, "has_gauss": 0, "gauss": 0.0}
_WITHOUT_WORDS: Final[Any] = _WithoutWords()


def cached_normal() -> dict[str, Any]:
    """Return the normal number that NumPy's legacy generator has cached, for `set_cached_normal`."""
    bits, LEGACY._bit_generator = LEGACY._bit_generator, _WITHOUT_WORDS
    try:
        return dict(LEGACY.get_state(legacy=False))
    finally:
        LEGACY._bit_generator = bits


def set_cached_normal(normal: Mapping[str, Any]) -> None:
    bits, LEGACY._bit_generator = LEGACY._bit_generator, _WITHOUT_WORDS
    try:
        LEGACY.set_state(normal)
    finally:
        LEGACY._bit_generator = bits


Generator: TypeAlias = (
    np.random.Generator
    | np.random.RandomState
    | np.random.BitGenerator
    | np.random.SeedSequence
    | random.Random
    | torch.Generator
)

_SEEDS: Final = Struct("<QIQ16s")  # for Python, NumPy, torch, and entropy
KINDS: Final = get_args(Generator)


def digest(*key: int, size: int, purpose: bytes = b"") -> bytes:
    """Return `size` bytes (at most 64) as a function of the key, on every machine; purposes are independent."""
    return blake2b(b"%d," * len(key) % key, digest_size=size, person=purpose).digest()


def seed_all(*key: int) -> None:
    """Seed the CPU's global generators by a key: Python, NumPy's legacy generator and torch.

    NumPy's entropy from the operating system, for example for `np.random.default_rng()` without a seed, becomes a
    function of the key too; each request gets its own. CUDA generators are not seeded.

    Args:
        key: integers of any size and sign.
    """
    python, numpy, pytorch, entropy = _SEEDS.unpack(digest(*key, size=_SEEDS.size))
    _SEED(PYTHON, python)  # random.seed() does these two after a check of the type
    PYTHON.gauss_next = None
    bits = mtrand.get_bit_generator()
    if type(bits) is not np.random.MT19937:  # set by the user
        bits = np.random.MT19937(0)
        mtrand.set_bit_generator(bits)
    bits._legacy_seeding(numpy)  # np.random.seed() does these two, but its lock costs as much
    set_cached_normal(NO_NORMAL)
    TORCH.manual_seed(pytorch)  # torch.manual_seed also queues calls for CUDA: 70 times slower
    _set_entropy(_KeyedEntropy(entropy))


def isolated(*, one_thread: bool = True) -> _Isolation:
    """Return a context for loading in the training process; contexts may be nested.

    It begins with an arbitrary state, so seed inside it. On exit, also by an exception, these are restored: Python's
    generator, NumPy's legacy generator (the same bit generator object and its cached normal number), torch's CPU
    generator and NumPy's source of entropy. CUDA generators are not restored, because loading runs on the CPU.

    Args:
        one_thread: use one torch thread inside, as in a worker of a DataLoader: sums depend on the number.
    """
    return _Isolation(one_thread)


def key_generators(generators: Sequence[Generator], *key: int) -> None:
    for place, generator in enumerate(generators):
        seed = int.from_bytes(digest(*key, place, size=16, purpose=b"held"), "little")
        if isinstance(generator, np.random.Generator):
            _key_bits(generator.bit_generator, seed)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed % 2**64)
        elif isinstance(generator, np.random.RandomState):
            bits = generator._bit_generator
            if isinstance(bits, np.random.MT19937):
                generator.seed(seed % 2**32)
            else:
                _key_bits(bits, seed)
                generator.set_state({**generator.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})
        elif isinstance(generator, np.random.BitGenerator):
            _key_bits(generator, seed)
        elif isinstance(generator, np.random.SeedSequence):
            generator.__init__(seed, pool_size=generator.pool_size)  # type: ignore[misc]  # it has no other way
        else:
            generator.seed(seed)


def is_global(generator: Generator) -> bool:
    return any(generator is global_one for global_one in (PYTHON, LEGACY, TORCH))


def generator_states() -> list[Any]:
    # The states of the global generators and the number of entropy requests, for comparison.
    source = _entropy()
    requests = source.draws if isinstance(source, _KeyedEntropy) else None
    bits = mtrand.get_bit_generator().state
    return [random.getstate(), bits, cached_normal(), TORCH.get_state(), requests]


def digest_draws() -> int:
    """Return a digest of the states of the global generators: Python, NumPy (legacy), torch, and CUDA devices in use.

    A Mersenne Twister has 624 words and an index. A draw increments the index, and all words change at its end, so the
    index and the first word identify the state.
    """
    value = 0 if (cached := PYTHON.gauss_next) is None else hash(cached) & 0xFFFFFFFF  # equal in all processes
    value = crc32(repr(PYTHON.getstate()).encode() if _PYTHON_MEMORY is None else _PYTHON_MEMORY[:8], value)
    bits = mtrand.get_bit_generator()
    if type(bits) is np.random.MT19937:  # its state would copy the words
        words = ctypes.string_at(bits.ctypes.state_address, 625 * 4)
        value = crc32(words[:4] + words[-4:], value)
    else:
        value = crc32(repr(bits.state).encode(), value)
    value = crc32(TORCH.get_state().numpy()[:32], value ^ cached_normal()["has_gauss"])
    is_used: Callable[[], bool] = torch.cuda.is_initialized
    for generator in torch.cuda.default_generators if is_used() else ():
        value = crc32(generator.get_state().numpy().data, value)  # a few bytes on the host
    return value


def _key_bits(bits: Any, seed: int) -> None:
    bits.__setstate__(type(bits)(seed).__getstate__())  # from NumPy 2 on this includes the state for `spawn`


class _Isolation:
    """One use of `isolated()`.

    Saving NumPy's legacy generator by its state costs 50 us, mostly for copying the words of the bit generator.
    Therefore another bit generator takes its place, and only the cached normal number is saved.
    """

    __slots__ = ("bits", "entropy", "gauss", "normal", "one_thread", "python", "spare", "threads", "torch")

    def __init__(self, one_thread: bool) -> None:
        self.one_thread = one_thread

    def __enter__(self) -> None:
        self.python: Any = PYTHON.getstate() if _PYTHON_MEMORY is None else bytes(_PYTHON_MEMORY)
        self.gauss = PYTHON.gauss_next
        self.torch = TORCH.get_state()
        self.entropy = _entropy()
        self.bits, self.normal = mtrand.get_bit_generator(), cached_normal()
        self.spare = _SPARES.pop() if _SPARES else np.random.MT19937(0)
        mtrand.set_bit_generator(self.spare)
        self.threads = torch.get_num_threads() if self.one_thread else 1
        if self.threads > 1:
            torch.set_num_threads(1)

    def __exit__(self, *raised: object) -> None:
        if self.threads > 1:
            torch.set_num_threads(self.threads)
        mtrand.set_bit_generator(self.bits)
        set_cached_normal(self.normal)
        _SPARES.append(self.spare)
        _set_entropy(self.entropy)
        TORCH.set_state(self.torch)
        if _PYTHON_MEMORY is None:
            PYTHON.setstate(self.python)
        else:
            _PYTHON_MEMORY[:] = self.python
        PYTHON.gauss_next = self.gauss


_SEED: Final[Any] = random.Random.__base__.seed  # type: ignore[union-attr]  # in C
_SPARES: Final[list[Any]] = []
_PYTHON_MEMORY: Final = python_memory(PYTHON)


def _entropy() -> Any:
    return getattr(_bit_generator, "randbits", None)


def _set_entropy(source: Any) -> None:
    _bit_generator.randbits = source  # type: ignore[attr-defined]  # private; SEEDLESS_IS_KEYED is False if it is missing


class _KeyedEntropy:
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
    _set_entropy(_KeyedEntropy(b""))
    try:
        return np.random.SeedSequence().entropy == _KeyedEntropy(b"")(128)
    finally:
        _set_entropy(before)


SEEDLESS_IS_KEYED: Final = _is_seedless_keyed()
"""Whether `seed_all` also seeds `np.random.default_rng()`, which needs a private name of NumPy."""
