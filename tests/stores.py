"""The least that counts as a state, stores that are closed when their test ends, and a schema before the present."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph.core.checkpoint.state.schema import SCHEMA, STEPS, training_named
from heliograph.core.checkpoint.storage import Files, Store, read_manifest
from heliograph.core.checkpoint.storage.manifest import encode, manifest_path

GOLDEN = Path(__file__).parent / "golden" / f"schema_{SCHEMA}"


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
    return lambda: sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock")


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Let there be a schema before the present one, which called `data` otherwise; return what makes a state of it."""

    def migrate(state: dict[str, Any]) -> list[str]:
        state["data"] = state.pop("place")
        return ["'place' is called 'data'"]

    def make(state: dict[str, Any]) -> dict[str, Any]:
        old = {**state, "schema": SCHEMA - 1, "place": state["data"]}
        del old["data"]
        return old

    monkeypatch.setitem(STEPS, SCHEMA - 1, migrate)
    return make


@pytest.fixture
def old(tmp_path: Path, older: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Return a folder with the golden checkpoints, as the older schema would have had them."""
    for path in GOLDEN.glob("golden*"):
        shutil.copy2(path, tmp_path)
    for path in tmp_path.glob("*.pth"):
        entry = read_manifest(path)
        torch.save(older(torch.load(path, weights_only=True)), path)
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        former = replace(entry, schema=SCHEMA - 1, size=len(content), sha256=digest)
        manifest_path(path).write_bytes(encode(former))
    return tmp_path
