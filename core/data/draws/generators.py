"""Seeding every random generator by a key, and keeping the draws of loading apart from those of training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b, shake_128
from struct import Struct
from typing import Any, Final, TypeAlias, get_args

import numpy as np
import torch
from numpy.random import bit_generator as _bit_generator
from numpy.random import mtrand

from .memory import LEGACY, NO_NORMAL, PYTHON, TORCH, states

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
        self._last: dict[tuple[int, ...], tuple[int, ...]] = {}  # of each seed and epoch: several streams alternate
        self._ahead: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def of(self, key: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the seeds of the generators in their order."""
        seeds = self._ahead.pop(key, None) or self._look_ahead(key)
        self._last[key[:2]] = key
        return seeds

    def _look_ahead(self, key: tuple[int, ...]) -> tuple[Any, ...]:
        if len(self._last) > _SOURCES:  # of former epochs
            self._last.clear()
            self._ahead.clear()
        last, keys = self._last.get(key[:2], ()), [key]
        if len(key) == len(last) > 2 and key != last == (*key[:2], last[2], *key[3:]):
            begin, position, rest = key[:2], key[2], key[3:]
            step = position - last[2]
            keys += [(*begin, position + step * number, *rest) for number in range(1, _AHEAD)]
        self._ahead |= {each: _SEEDS.unpack(digest(*each, size=_SEEDS.size)) for each in keys}
        return self._ahead.pop(key)


_AHEAD: Final = 32
_SOURCES: Final = 8
_DRAWN: Final = _Seeds()


def seed_all(*key: int) -> None:
    """Seed the CPU's global generators by a key: python, NumPy's legacy generator and torch.

    What NumPy takes from the operating system, for `np.random.default_rng()` without a seed say, is a function of
    the key from now on too, and numbers as often as it is asked for. CUDA generators are left alone.

    Args:
        key: integers of any size and sign.
    """
    python, numpy, pytorch, entropy = _DRAWN.of(key)
    _SEED(PYTHON, python)  # random.seed() looks at the type first, then does these two
    PYTHON.gauss_next = None
    bits = mtrand.get_bit_generator()
    if type(bits) is not np.random.MT19937:  # the user has put it there
        bits = np.random.MT19937(0)
        mtrand.set_bit_generator(bits)
    bits._legacy_seeding(numpy)  # np.random.seed() takes a lock that costs as much, then does these two
    _NORMAL.restore(NO_NORMAL)
    TORCH.manual_seed(pytorch)  # torch.manual_seed also queues calls for CUDA: 70 times slower
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
    """Return whether `seed_all` seeds a generator."""
    return any(generator is each for each in (PYTHON, LEGACY, TORCH))


def generator_states() -> list[Any]:
    """Return the states of the global generators, and how often NumPy asked for entropy; to be compared."""
    source = _entropy()
    asked = source.draws if isinstance(source, _Keyed) else None
    bits = mtrand.get_bit_generator().state
    return [random.getstate(), bits, bytes(_NORMAL.save(_NORMAL.room())), TORCH.get_state(), asked]


def _key_bits(bits: Any, seed: int) -> None:
    bits.__setstate__(type(bits)(seed).__getstate__())  # from NumPy 2 on also what `spawn` draws from


class _Isolation:
    """One use of `isolated()`.

    Saving NumPy's legacy generator by its state costs 50 us, nearly all of it for copying the words of the bit
    generator. Another bit generator is put in its place instead; then only the cached normal number must be kept.
    What keeps the other states is in memory.py.
    """

    __slots__ = ("bits", "entropy", "gauss", "normal", "one_thread", "python", "spare", "threads", "torch")

    def __init__(self, one_thread: bool) -> None:
        self.one_thread = one_thread
        self.python, self.torch, self.normal = _PYTHON.room(), _TORCH.room(), _NORMAL.room()

    def __enter__(self) -> None:
        self.python, self.gauss = _PYTHON.save(self.python), PYTHON.gauss_next
        self.torch = _TORCH.save(self.torch)
        self.entropy = _entropy()
        self.bits, self.normal = mtrand.get_bit_generator(), _NORMAL.save(self.normal)
        self.spare = _SPARES.pop() if _SPARES else np.random.MT19937(0)
        mtrand.set_bit_generator(self.spare)
        self.threads = torch.get_num_threads() if self.one_thread else 1
        if self.threads > 1:
            torch.set_num_threads(1)

    def __exit__(self, *raised: object) -> None:
        if self.threads > 1:
            torch.set_num_threads(self.threads)
        mtrand.set_bit_generator(self.bits)
        _NORMAL.restore(self.normal)
        _SPARES.append(self.spare)
        _set_entropy(self.entropy)
        _TORCH.restore(self.torch)
        _PYTHON.restore(self.python)
        PYTHON.gauss_next = self.gauss


_SEED: Final[Any] = random.Random.__base__.seed  # type: ignore[union-attr]  # in C
_SPARES: Final[list[Any]] = []
_PYTHON, _TORCH, _NORMAL = states()


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
