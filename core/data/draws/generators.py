"""Seeding every random generator by a key, and keeping the draws of loading apart from those of training."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
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
    spare = _without_bits(partial(_LEGACY.get_state, legacy=False))
    return [random.getstate(), bits, spare, torch.default_generator.get_state(), asked]


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
        return {"bit_generator": "MT19937", "state": {}}  # a new one: RandomState adds its own to it

    @state.setter
    def state(self, value: Any) -> None:
        """Take nothing."""


_PYTHON: Final[Any] = random._inst  # the generator of random.random and the like
_LEGACY: Final[Any] = mtrand._rand  # the generator of np.random.rand and the like
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
