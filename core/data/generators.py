"""Seeding of all random generators by a key, and isolation of loading from the training."""

from __future__ import annotations

import ctypes
import random
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import shake_128
from struct import Struct
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.random import bit_generator as _bit_generator
from numpy.random import mtrand

from .rng import LEGACY, PYTHON, TORCH, Generator, digest


class MemoryState:
    """A state in memory; only the GIL protects it."""

    __slots__ = ("_bytes",)

    def __init__(self, address: int, size: int) -> None:
        self._bytes = memoryview((ctypes.c_char * size).from_address(address)).cast("B")

    def part(self, begin: int, end: int) -> memoryview:
        # A live view.
        return self._bytes[begin:end]

    def save(self) -> bytes:
        return self._bytes.tobytes()

    def restore(self, state: Any) -> None:
        self._bytes[:] = state


class MethodState:
    """The same through public methods, which every version has."""

    def __init__(self, save: Callable[[], Any], restore: Callable[[Any], Any]) -> None:
        self.save, self.restore = save, restore

    def part(self, begin: int, end: int) -> None:
        # None: the layout is unknown.
        pass


State: TypeAlias = MemoryState | MethodState

_RANDOM_LAYOUT: Final = Struct("=i624I")  # in C: the position, and the words
_NORMAL_LAYOUT: Final = Struct("=i4xd")  # whether a number is cached, and the number
_ENGINE_LAYOUT: Final = Struct("=Qi4xI624I4x8x16x")  # the seed, the position, the words; an optional float and double
_SEED_LAYOUT: Final = Struct("=Q")
_HEAD: Final = object.__basicsize__
_FARTHEST: Final = 256  # largest offset of the engine in bytes
_PATTERN: Final = 0x9E3779B97F4A7C15  # a seed that is not in memory by chance
_DRAWS: Final = (0, 1, 622, 1, 1, 700)  # to the end of the words, to the start, and between
NO_NORMAL: Final = _NORMAL_LAYOUT.pack(0, 0.0)


def states() -> tuple[State, State, State]:
    # Python's generator, torch's CPU generator, and NumPy's cached normal number.
    return of_python(), of_torch(), of_normal()


def of_python() -> State:
    # The words only: the cached normal number of Python's generator is an attribute.
    if _is_python_known():
        return MemoryState(id(PYTHON) + _HEAD, _RANDOM_LAYOUT.size)
    return MethodState(PYTHON.getstate, PYTHON.setstate)


def of_torch() -> State:
    place = _place_in_torch()
    if place is None:
        return MethodState(TORCH.get_state, TORCH.set_state)
    return MemoryState(TORCH._cdata + place, _ENGINE_LAYOUT.size)


def of_normal() -> State:
    place = _place_in_numpy()
    if place is None:
        return MethodState(partial(_normal, LEGACY), partial(_set_normal, LEGACY))
    return MemoryState(id(LEGACY) + place, _NORMAL_LAYOUT.size)


def _is_python_known() -> bool:
    # Verifies the layout on a twin; reads no memory beyond the object.
    base: Any = random.Random.__base__
    has_lock = _has_addresses() and not sysconfig.get_config_var("Py_GIL_DISABLED")
    if not has_lock or type(PYTHON) is not random.Random or base.__basicsize__ < _HEAD + _RANDOM_LAYOUT.size:
        return False
    twin = random.Random(1)  # noqa: S311  # only compared
    words = MemoryState(id(twin) + _HEAD, _RANDOM_LAYOUT.size)
    index, *numbers = _RANDOM_LAYOUT.unpack(words.save())
    return (3, (*numbers, index), None) == twin.getstate() and _is_state(
        words, lambda number: twin.getrandbits(32 * number), twin.getstate
    )


def _place_in_numpy() -> int | None:
    # The offset of the cached normal number; None if unknown.
    if not _has_addresses() or type(LEGACY) is not np.random.RandomState:
        return None
    twin = np.random.RandomState(1)
    twin.standard_normal()
    place = MemoryState(id(twin), np.random.RandomState.__basicsize__).save().find(_normal(twin))
    if place < 0:
        return None
    words = MemoryState(id(twin) + place, _NORMAL_LAYOUT.size)
    return place if _is_state(words, lambda _: twin.standard_normal(), partial(_normal, twin)) else None


def _place_in_torch() -> int | None:
    # The offset of the engine; None if unknown.
    if not hasattr(TORCH, "_cdata"):
        return None
    twin: Any = torch.Generator("cpu").manual_seed(_PATTERN)
    place = next((offset for offset in range(8, _FARTHEST, 8) if _seed_at(twin, offset) == _PATTERN), None)
    if place is None or _seed_at(TORCH, place) != TORCH.initial_seed():
        return None

    def draw(number: int) -> None:
        torch.rand(number, generator=twin, device="cpu", dtype=torch.float32)
        torch.randn(1, generator=twin, device="cpu")  # every other time, a second one is cached

    words = MemoryState(twin._cdata + place, _ENGINE_LAYOUT.size)
    public = twin.get_state()[24 : 24 + 624 * 8].view(torch.int64).tolist()  # it has each word in eight bytes
    if list(_ENGINE_LAYOUT.unpack(words.save())[3:]) != public:
        return None
    return place if _is_state(words, draw, lambda: twin.get_state().numpy().tobytes()) else None


def _is_state(memory: MemoryState, draw: Callable[[int], object], now: Callable[[], Any]) -> bool:
    # Whether restoring the bytes restores the state, at several positions.
    states = [(draw(number), memory.save(), now())[1:] for number in _DRAWS]
    for image, expected in states:
        memory.restore(image)
        if now() != expected:
            return False
    return True


def _has_addresses() -> bool:
    return sys.implementation.name == "cpython"


def _seed_at(generator: Any, place: int) -> int:
    return int(_SEED_LAYOUT.unpack(MemoryState(generator._cdata + place, _SEED_LAYOUT.size).save())[0])


def _normal(generator: Any) -> bytes:
    state = generator.get_state(legacy=False)
    return _NORMAL_LAYOUT.pack(state["has_gauss"], state["gauss"])


def _set_normal(generator: Any, normal: bytes) -> None:
    has_number, number = _NORMAL_LAYOUT.unpack(normal)
    generator.set_state({**generator.get_state(legacy=False), "has_gauss": has_number, "gauss": number})


_SEEDS: Final = Struct("<QIQ16s")  # for Python, NumPy, torch, and entropy


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
    _NORMAL.restore(NO_NORMAL)
    TORCH.manual_seed(pytorch)  # torch.manual_seed also queues calls for CUDA: 70 times slower
    _set_entropy(_KeyedEntropy(entropy))


def isolated(*, one_thread: bool = True) -> Isolation:
    """Return a context for loading in the training process; contexts may be nested.

    On exit, also by an exception, these are restored: Python's generator, NumPy's legacy generator (the same bit
    generator object and its cached normal number), torch's CPU generator and NumPy's source of entropy. CUDA generators
    are not restored, because loading runs on the CPU.

    Args:
        one_thread: use one torch thread inside, as in a worker of a DataLoader: sums depend on the number.
    """
    return Isolation(one_thread=one_thread)


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


def generator_states() -> list[Any]:
    # The states of the global generators and the number of entropy requests, for comparison.
    source = _entropy()
    requests = source.draws if isinstance(source, _KeyedEntropy) else None
    bits = mtrand.get_bit_generator().state
    return [random.getstate(), bits, _NORMAL.save(), TORCH.get_state(), requests]


def _key_bits(bits: Any, seed: int) -> None:
    bits.__setstate__(type(bits)(seed).__getstate__())  # from NumPy 2 on this includes the state for `spawn`


class Isolation:
    """One use of `isolated()`. The states are saved only if the training has drawn since the last use.

    Attributes:
        has_drawn: whether the code drew from one of these generators, or seeded one. Set on exit.
        detects_draws: whether that is known; otherwise `has_drawn` is True.
    """

    def __init__(self, *, one_thread: bool) -> None:
        self.has_drawn = self.detects_draws = True
        self._one_thread = one_thread
        self._counter = _KeyedEntropy(b"")
        self._bits: Any = None
        self._states: list[State] = []
        self._marks: list[memoryview] = []
        self._saved: list[Any] = []
        self._saved_at = b""  # the marks of the saved states

    def __enter__(self) -> None:
        if (bits := mtrand.get_bit_generator()) is not self._bits:
            self._follow(bits)
        self._before, self._gauss = b"".join(self._marks), PYTHON.gauss_next
        if self._before != self._saved_at or not self.detects_draws:
            self._saved = [state.save() for state in self._states]
            self._saved_at = self._before
        self._entropy, self._counter.draws = _entropy(), 0
        _set_entropy(self._counter)
        self._threads = torch.get_num_threads() if self._one_thread else 1
        if self._threads > 1:
            torch.set_num_threads(1)

    def __exit__(self, *raised: object) -> None:
        if self._threads > 1:
            torch.set_num_threads(self._threads)
        is_replaced = mtrand.get_bit_generator() is not self._bits
        self.has_drawn = (
            b"".join(self._marks) != self._before
            or _entropy() is not self._counter
            or self._counter.draws > 0
            or PYTHON.gauss_next is not self._gauss
            or is_replaced
            or not self.detects_draws
        )
        _set_entropy(self._entropy)
        if self.has_drawn:
            if is_replaced:
                mtrand.set_bit_generator(self._bits)
            for state, saved in zip(self._states, self._saved, strict=True):
                state.restore(saved)
            PYTHON.gauss_next = self._gauss

    def _follow(self, bits: Any) -> None:
        states = (_PYTHON, _TORCH, _of_bits(bits), _NORMAL)
        self._bits, self._states, self._saved_at = bits, list(states), b""
        python, pytorch, numpy, normal = states
        self._marks, self.detects_draws = [], SEEDLESS_IS_KEYED
        spans = (
            (python, (0, 12)),  # the position and two words, because the first is the same after every `seed`
            (pytorch, (0, 24)),  # the seed, the position and a word
            (pytorch, (_ENGINE_LAYOUT.size - 24, _ENGINE_LAYOUT.size)),  # cached normal numbers
            (numpy, (_MT_SIZE - 8, _MT_SIZE)),  # a word and the position
            (normal, (0, _NORMAL_LAYOUT.size)),
        )
        for state, span in spans:
            if isinstance(state, MemoryState):
                self._marks.append(state.part(*span))
            else:
                self.detects_draws = False


class OwnStream(Isolation):
    """Isolation for code with a separate random stream. The next use continues the stream.

    Args:
        key: of the stream.
    """

    def __init__(self, *key: int) -> None:
        super().__init__(one_thread=True)
        self._key = key
        self._own: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        super().__enter__()
        if self._own is None:
            mtrand.set_bit_generator(np.random.MT19937(0))
            seed_all(*self._key)
            return
        bits, python, pytorch, normal, PYTHON.gauss_next, entropy = self._own
        mtrand.set_bit_generator(bits)
        _PYTHON.restore(python)
        _TORCH.restore(pytorch)
        _NORMAL.restore(normal)
        _set_entropy(entropy)

    def __exit__(self, *raised: object) -> None:
        bits, entropy = mtrand.get_bit_generator(), _entropy()
        self._own = bits, _PYTHON.save(), _TORCH.save(), _NORMAL.save(), PYTHON.gauss_next, entropy
        super().__exit__(*raised)


def _of_bits(bits: Any) -> State:
    if type(bits) is np.random.MT19937 and _has_addresses():
        return MemoryState(bits.ctypes.state_address, _MT_SIZE)
    return MethodState(lambda: bits.state, partial(setattr, bits, "state"))


_MT_SIZE: Final = 625 * 4  # of NumPy's MT19937: the words, then the position
_SEED: Final[Any] = random.Random.__base__.seed  # type: ignore[union-attr]  # in C
_PYTHON, _TORCH, _NORMAL = states()


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
