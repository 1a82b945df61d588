"""Seeding of all random generators by a key, and isolation of loading from the training."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b, shake_128
from struct import Struct
from typing import Any, Final, TypeAlias, get_args

import numpy as np
import torch
from numpy.random import bit_generator as _bit_generator
from numpy.random import mtrand

PYTHON: Final[Any] = random._inst  # the generator of the functions in `random`
LEGACY: Final[Any] = mtrand._rand  # the generator of the functions in `np.random`
TORCH: Final[Any] = torch.default_generator


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
    bits._legacy_seeding(numpy)  # np.random.seed() does these two, but its lock costs as much
    mtrand.set_bit_generator(bits)  # drops the cached normal number
    TORCH.manual_seed(pytorch)  # torch.manual_seed also queues calls for CUDA: 70 times slower
    _set_entropy(_KeyedEntropy(entropy))


@contextmanager
def isolated(*, one_thread: bool = True) -> Iterator[None]:
    """Isolate loading in the training process; contexts may be nested.

    It begins with an arbitrary state, so seed inside it. On exit, also by an exception, these are restored: Python's
    generator, NumPy's legacy generator (the same bit generator object and its cached normal number), torch's CPU
    generator and NumPy's source of entropy. CUDA generators are not restored, because loading runs on the CPU.

    Args:
        one_thread: use one torch thread inside, as in a worker of a DataLoader: sums depend on the number.
    """
    python, pytorch, entropy = PYTHON.getstate(), TORCH.get_state(), _entropy()
    numpy, bits = LEGACY.get_state(legacy=False), mtrand.get_bit_generator()
    mtrand.set_bit_generator(np.random.MT19937(0))  # faster than restoring all words of the bit generator
    threads = torch.get_num_threads() if one_thread else 1
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)
        mtrand.set_bit_generator(bits)  # drops the cached normal number
        if numpy["has_gauss"]:
            LEGACY.set_state(numpy)
        _set_entropy(entropy)
        TORCH.set_state(pytorch)
        PYTHON.setstate(python)


def key_generators(generators: Sequence[Generator], *key: int) -> None:
    for place, generator in enumerate(generators):
        seed = int.from_bytes(digest(*key, place, size=16, purpose=b"held"), "little")
        if isinstance(generator, np.random.Generator):
            _key_bits(generator.bit_generator, seed)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed % 2**64)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(seed % 2**32)
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
    return [random.getstate(), LEGACY.get_state(legacy=False), TORCH.get_state(), requests]


def _key_bits(bits: Any, seed: int) -> None:
    bits.__setstate__(type(bits)(seed).__getstate__())  # from NumPy 2 on this includes the state for `spawn`


_SEED: Final[Any] = random.Random.__base__.seed  # type: ignore[union-attr]  # in C


def _entropy() -> Any:
    return getattr(_bit_generator, "randbits", None)


def _set_entropy(source: Any) -> None:
    _bit_generator.randbits = source  # type: ignore[attr-defined]  # private


class _KeyedEntropy:
    """Replaces the entropy of the operating system."""

    __slots__ = ("draws", "key")

    def __init__(self, key: bytes) -> None:
        self.key, self.draws = key, 0

    def __call__(self, bits: int) -> int:
        block = shake_128(self.key + b"%d" % self.draws).digest(-(-bits // 8))
        self.draws += 1
        return int.from_bytes(block, "little") >> (-bits % 8)
