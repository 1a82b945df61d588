"""The least that counts as a state, and stores that are closed when their test ends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph.core.checkpoint.schema import SCHEMA
from heliograph.core.checkpoint.storage import Files, Store
from heliograph.core.checkpoint.storage.files import SYSTEM
from heliograph.core.checkpoint.storage.manifest import Entry, encode
from heliograph.core.checkpoint.storage.untrusted_files import END, END_SIZE


def seal(path: Path, manifest: Callable[[int, str], bytes]) -> None:
    """Give a file of `torch.save` a manifest in place of the one it may have.

    Args:
        path: the file.
        manifest: returns any manifest for a size and a digest.
    """
    content = bytearray(path.read_bytes())
    del content[content.rfind(END) + END_SIZE - 2 :]
    path.write_bytes(content + b"\0\0")
    try:
        digest = SYSTEM.archive_digest(path, len(content) + 2, checks_data=False)
    except ValueError:  # forged
        digest = "0" * 64
    text = manifest(len(content) + 2, digest)
    path.write_bytes(content + len(text).to_bytes(2, "little") + text)


def unseal(path: Path) -> None:
    """Take the manifest of a file away: what is left is as another program's `torch.save` writes it."""
    seal(path, lambda size, sha256: b"")


def seal_as(path: Path, entry: Entry) -> Entry:
    """Give a file of `torch.save` the manifest of an entry, with the right size and digest; return that entry."""
    sealed = []

    def manifest(size: int, sha256: str) -> bytes:
        sealed.append(replace(entry, path=path, size=size, sha256=sha256))
        return encode(sealed[-1])

    seal(path, manifest)
    return sealed[-1]


def training_named(run_name: str) -> str:
    """Return the training id of the states of a name."""
    return hashlib.sha256(run_name.encode()).hexdigest()[:32]


@pytest.fixture
def state() -> Callable[..., dict[str, Any]]:
    """Return a maker of states; the tensor inside says which one it is."""

    def make(steps: int = 0, *, name: str = "run", **more: Any) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "saved_at": 1000.0 + steps,
            "versions": {"heliograph": "0"},
            "world": {"size": 1},
            "run_name": name,
            "training_id": training_named(name),
            "progress": {"steps": steps},
            "control": {},
            "data": {},
            "modules": {"model": {"weight": torch.full((50,), float(steps))}},
            "optimizers": {},
            "schedulers": {},
            "ranks": [{}],
            "plugins": {},
            "metrics": {"validation/loss": 0.5},
            **more,
        }

    return make


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Return a maker of open stores, by default of the run `run` in the test's folder."""
    with ExitStack() as stack:

        def make(name: str = "run", *, folder: Path = tmp_path, files: Files | None = None) -> Store:
            store = stack.enter_context(closing(Store(folder, name, files=files)))
            store.open()
            return store

        yield make


@pytest.fixture
def names(tmp_path: Path) -> Callable[[], list[str]]:
    """Return a function that lists the test's folder, but for locks."""
    return lambda: sorted(path.name for path in tmp_path.iterdir() if path.suffix not in (".lock", ".holder"))
