"""The kinds of random generators: seed, save and restore them; states are plain types, tensors and bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Final, TypeAlias, get_args

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

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
KINDS: Final = get_args(Generator)


def digest(*key: int, size: int, purpose: bytes = b"") -> bytes:
    """Return `size` bytes (at most 64) as a function of the key, on every machine; purposes are independent."""
    return blake2b(b"%d," * len(key) % key, digest_size=size, person=purpose).digest()


def is_global(generator: Generator) -> bool:
    return any(generator is global_one for global_one in (PYTHON, LEGACY, TORCH))


def seed_all(seed: int) -> None:
    """Seed Python, NumPy's legacy generator, and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # third-party code uses it
    torch.manual_seed(seed)


def name_seed(seed: int) -> None:
    # Sets `torch.initial_seed()` without changing the stream of random numbers.
    state = torch.get_rng_state()
    first = state[:8].view(torch.uint64)  # torch's format starts with the initial seed
    if first.item() == torch.initial_seed():
        first.fill_(seed)
        torch.set_rng_state(state)


def capture() -> dict[str, Any]:
    """Return the states of all global generators."""
    return {
        "python": pack_python(random.getstate()),
        "numpy": pack_numpy(np.random.get_state(legacy=False)),
        "torch": pack_torch(torch.get_rng_state()),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(state: Mapping[str, Any]) -> None:
    """Restore the states of all global generators.

    CUDA states are restored for the devices that exist.
    """
    random.setstate(_unpacked(state["python"]))
    np.random.set_state(_from_plain(state["numpy"]))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


@contextmanager
def kept() -> Iterator[None]:
    # Restores every global generator on exit.
    state = capture()
    try:
        yield
    finally:
        restore(state)


def generator_state(generator: Generator) -> Any:
    if isinstance(generator, np.random.Generator):
        return pack_numpy(generator.bit_generator.state)
    if isinstance(generator, np.random.BitGenerator):
        return pack_numpy(generator.state)
    if isinstance(generator, np.random.SeedSequence):
        as_numbers = np.vectorize(int, otypes=[object])
        entropy = as_numbers(np.asarray(generator.entropy, dtype=object)).tolist()  # a number, or several
        spawn_key = [int(key) for key in generator.spawn_key]
        return [entropy, spawn_key, generator.pool_size, generator.n_children_spawned]
    if isinstance(generator, np.random.RandomState):
        return pack_numpy(generator.get_state(legacy=False))
    if isinstance(generator, torch.Generator):
        return pack_torch(generator.get_state())
    return pack_python(generator.getstate())


def set_generator_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _from_plain(state)
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = _from_plain(state)
    elif isinstance(generator, np.random.SeedSequence):
        entropy, spawn_key, pool_size, spawned = state
        generator.__init__(  # type: ignore[misc]  # it has no other way
            entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=spawned
        )
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_from_plain(state))
    elif isinstance(generator, torch.Generator):
        generator.set_state(_tensor(state))
    else:
        generator.setstate(_unpacked(state))


def pack_python(state: tuple[int, Any, float | None]) -> list[Any]:
    # As bytes, because a list of words makes each of them an object.
    version, words, gauss = state
    return [version, struct.pack(f"<{len(words)}I", *words), gauss]


def _unpacked(state: Any) -> tuple[int, Any, float | None]:
    version, words, gauss = state
    return version, struct.unpack(f"<{len(words) // 4}I", words), gauss


def pack_torch(state: Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def pack_numpy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: pack_numpy(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "values": value.astype(_little(value.dtype)).tobytes()}
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, Mapping) and value.keys() == {"dtype", "values"}:
        dtype = np.dtype(value["dtype"])
        return np.frombuffer(value["values"], _little(dtype)).astype(dtype)
    return {key: _from_plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")
