"""The digest of the global random generators: what has drawn a number has changed it."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np
import torch
from heliograph.core.data.draws.generators import states
from numpy.random import mtrand

PYTHON: Any = random._inst  # the generator of random.random and the like
WORD = 4  # bytes
NUMPY_INDEX = 624 * WORD  # where in the state of NumPy's generator the index lies: after the words
TORCH_INDEX, TORCH_WORD = (8, 12), (16, 24)  # where in that of torch the index lies, and the first words


class GlobalDraws:
    """Makes the digest of python's generator, NumPy's legacy one, torch's on the CPU and those of CUDA devices in use.

    A Mersenne Twister is 624 words, and the index of the next. A draw moves the index, and at the end of the words all
    of them become others: so the index and the first word stand for the whole. They are read where they lie in memory,
    for methods copy all the words; where that place is not known, methods it is.
    """

    def __init__(self) -> None:
        self._parts: list[memoryview] = []
        self._methods: list[Callable[[], Any]] = []
        spans = [(0, 2 * WORD)], [TORCH_INDEX, TORCH_WORD], [(0, WORD)]
        methods: tuple[Callable[[], Any], ...] = random.getstate, torch.get_rng_state, np.random.get_state
        for state, places, method in zip(states(), spans, methods, strict=True):
            parts = state.parts(*places)
            self._parts += parts
            self._methods += [] if parts else [method]
        self._bits: Any = None
        self._all: list[memoryview] = []

    def digest(self) -> int:
        """Return the digest, of 32 bits."""
        bits = mtrand.get_bit_generator()
        if bits is not self._bits:
            self._bits, self._of_numpy = bits, _parts_of_numpy(bits)
            self._all = [*self._parts, *self._of_numpy]
        value = 0 if (cached := PYTHON.gauss_next) is None else hash(cached) & 0xFFFFFFFF  # the same in every process
        value = crc32(b"".join(self._all), value)
        if self._methods or not self._of_numpy or _cuda_is_used():
            value = self._rest(value)
        return value

    def _rest(self, value: int) -> int:
        state: Any
        for method in self._methods:
            state = method()
            value = crc32(bytes(state) if isinstance(state, torch.Tensor) else repr(state).encode(), value)
        if not self._of_numpy:
            value = crc32(repr(self._bits.state).encode(), value)
        for generator in torch.cuda.default_generators if _cuda_is_used() else ():
            state = generator.get_state().numpy()  # a few bytes that lie on the host
            value = crc32(state, value)
        return value


_cuda_is_used: Callable[[], bool] = torch.cuda.is_initialized


def _parts_of_numpy(bits: Any) -> list[memoryview]:
    if type(bits) is not np.random.MT19937:
        return []
    state = memoryview((ctypes.c_char * (NUMPY_INDEX + WORD)).from_address(bits.ctypes.state_address)).cast("B")
    return [state[:WORD], state[NUMPY_INDEX:]]
