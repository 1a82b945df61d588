"""The global generators as the memory that they are: saved and restored in a fraction of what their methods take."""

from __future__ import annotations

import ctypes
import random
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.random import mtrand

PYTHON: Final[Any] = random._inst  # the generator of random.random and the like
LEGACY: Final[Any] = mtrand._rand  # the generator of np.random.rand and the like
TORCH: Final[Any] = torch.default_generator


class Memory:
    """Saves and restores what lies in memory; no lock is taken but the interpreter's."""

    __slots__ = ("_bytes",)

    def __init__(self, address: int, size: int) -> None:
        self._bytes = memoryview((ctypes.c_char * size).from_address(address)).cast("B")

    def room(self) -> memoryview:
        """Return where a state has room: were that new each time, the allocator would hand out pieces of it between."""
        return memoryview(bytearray(len(self._bytes)))

    def parts(self, *spans: tuple[int, int]) -> list[memoryview]:
        """Return some bytes of the state, as they will be whenever they are read."""
        return [self._bytes[begin:end] for begin, end in spans]

    def image(self) -> bytes:
        """Return the state, to be compared."""
        return self._bytes.tobytes()

    def save(self, room: Any) -> Any:
        """Save the state where there is room for it."""
        room[:] = self._bytes
        return room

    def restore(self, state: Any) -> None:
        """Put it back."""
        self._bytes[:] = state


class Methods:
    """Does the same in the way that every version has."""

    def __init__(self, save: Callable[[], Any], restore: Callable[[Any], Any]) -> None:
        self._save, self.restore = save, restore

    def room(self) -> None:
        """Return nothing: a state is made when it is saved."""

    def parts(self, *spans: tuple[int, int]) -> list[memoryview]:
        """Return nothing: the state is not known to lie in memory."""
        return []

    def save(self, room: object) -> Any:
        """Return the state."""
        return self._save()


State: TypeAlias = Memory | Methods

_RANDOM: Final = Struct("=i624I")  # in C: where in the words it is, and the words
_NORMAL: Final = Struct("=i4xd")  # whether there is a number, and the number
_ENGINE: Final = Struct("=Qi4xI624I4x8x16x")  # the seed, where it is, the words; a float and a double, each if there
_SEED: Final = Struct("=Q")
_HEAD: Final = object.__basicsize__
_FARTHEST: Final = 256  # bytes from where an object begins to its engine
_PATTERN: Final = 0x9E3779B97F4A7C15  # a seed that is not in memory by chance
_DRAWS: Final = (0, 1, 622, 1, 1, 700)  # to the end of the words, to their beginning, and between
NO_NORMAL: Final = _NORMAL.pack(0, 0.0)


def states() -> tuple[State, State, State]:
    """Return the states of Python's generator, torch's on the CPU, and NumPy's cached normal number."""
    return of_python(), of_torch(), of_normal()


def of_python() -> State:
    """Return what keeps the words of python's generator; its cached normal number is an attribute."""
    return Memory(id(PYTHON) + _HEAD, _RANDOM.size) if _is_python_known() else Methods(PYTHON.getstate, PYTHON.setstate)


def of_torch() -> State:
    """Return what keeps torch's CPU generator."""
    place = _place_in_torch()
    return Methods(TORCH.get_state, TORCH.set_state) if place is None else Memory(TORCH._cdata + place, _ENGINE.size)


def of_normal() -> State:
    """Return what keeps the cached normal number of NumPy's legacy generator."""
    place = _place_in_numpy()
    if place is None:
        return Methods(partial(_normal, LEGACY), partial(_set_normal, LEGACY))
    return Memory(id(LEGACY) + place, _NORMAL.size)


def _is_python_known() -> bool:
    """Return whether the words lie in memory as expected; nothing beyond the object is looked at."""
    base: Any = random.Random.__base__
    has_lock = _has_addresses() and not sysconfig.get_config_var("Py_GIL_DISABLED")
    if not has_lock or type(PYTHON) is not random.Random or base.__basicsize__ < _HEAD + _RANDOM.size:
        return False
    twin = random.Random(1)  # noqa: S311  # its numbers are only compared
    words, states = Memory(id(twin) + _HEAD, _RANDOM.size), []
    for number in _DRAWS:
        for _ in range(number):
            twin.getrandbits(32)
        index, *numbers = _RANDOM.unpack(words.image())
        if (3, (*numbers, index), None) != twin.getstate():
            return False
        states.append((words.image(), twin.getstate()))
    return _all_return(words, states, twin.getstate)


def _place_in_numpy() -> int | None:
    """Return where in the object the cached normal number lies, None where that is not known."""
    if not _has_addresses() or type(LEGACY) is not np.random.RandomState:
        return None
    twin = np.random.RandomState(1)
    twin.standard_normal()
    place = Memory(id(twin), np.random.RandomState.__basicsize__).image().find(_normal(twin))
    if place < 0:
        return None
    words, states = Memory(id(twin) + place, _NORMAL.size), []
    for _ in range(3):  # with a number, without one, and with another
        states.append((words.image(), _normal(twin)))
        twin.standard_normal()
    return place if _all_return(words, states, partial(_normal, twin)) else None


def _place_in_torch() -> int | None:
    """Return where in the object the engine lies, None where that is not known."""
    if not hasattr(TORCH, "_cdata"):
        return None
    twin: Any = torch.Generator("cpu").manual_seed(_PATTERN)
    place = next((each for each in range(8, _FARTHEST, 8) if _seed_at(twin, each) == _PATTERN), None)
    if place is None or _seed_at(TORCH, place) != TORCH.initial_seed():
        return None
    words, states = Memory(twin._cdata + place, _ENGINE.size), []
    for number in _DRAWS:
        torch.rand(number, generator=twin, device="cpu", dtype=torch.float32)
        torch.randn(1, generator=twin, device="cpu")  # every other time, a second one is cached
        # The public state has the words from byte 24 on, each in eight bytes.
        if list(_ENGINE.unpack(words.image())[3:]) != twin.get_state()[24 : 24 + 624 * 8].view(torch.int64).tolist():
            return None
        states.append((words.image(), twin.get_state().numpy().tobytes()))
    return place if _all_return(words, states, lambda: twin.get_state().numpy().tobytes()) else None


def _has_addresses() -> bool:
    return sys.implementation.name == "cpython"


def _all_return(memory: Memory, states: list[tuple[bytes, Any]], now: Callable[[], Any]) -> bool:
    """Return whether each state is there again when its bytes are."""
    for state, expected in states:
        memory.restore(state)
        if now() != expected:
            return False
    return True


def _seed_at(generator: Any, place: int) -> int:
    return int(_SEED.unpack(Memory(generator._cdata + place, _SEED.size).image())[0])


def _normal(generator: Any) -> bytes:
    state = generator.get_state(legacy=False)
    return _NORMAL.pack(state["has_gauss"], state["gauss"])


def _set_normal(generator: Any, normal: bytes) -> None:
    has_one, number = _NORMAL.unpack(normal)
    generator.set_state({**generator.get_state(legacy=False), "has_gauss": has_one, "gauss": number})
