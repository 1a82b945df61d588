"""Compare two checkpoints, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from heliograph.spi import Store
from torch import Tensor


def compare(one: Path, other: Path) -> list[tuple[str, str, str]]:
    """Return the name and both fingerprints of each part of two checkpoints."""
    pairs = zip(_parts(one).items(), _parts(other).values(), strict=True)
    return [(name, fingerprint(first), fingerprint(second)) for (name, first), second in pairs]


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of nested plain values and tensors."""
    digest = hashlib.sha256()
    for piece in _pieces(value):
        digest.update(piece)
    return digest.hexdigest()


def _parts(checkpoint: Path) -> dict[str, Any]:
    state = Store(checkpoint.parent, checkpoint.stem).load(checkpoint)
    return {
        "weights": state["modules"],
        "optimizer": state["optimizers"],
        "scheduler": state["schedulers"],
        "random generators": state["plugins"]["rng_capture"],
    }


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        array = value.detach().contiguous().numpy()
        yield f"{array.dtype}{array.shape}".encode()
        yield array.tobytes()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield repr(key).encode()
            yield from _pieces(part)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for part in value:
            yield from _pieces(part)
    else:
        yield repr(value).encode()
