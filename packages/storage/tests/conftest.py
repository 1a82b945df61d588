"""A folder for the checkpoints of each test, and storage in memory that a test can fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from heliograph.packages.storage.tests.flaky import FlakyStorage
from heliograph.tests.builtin_callbacks.conftest import _global_generators

__all__ = ["_global_generators"]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("heliograph_storage.remote_copy.PAUSES", (0.01,))
    monkeypatch.setattr("heliograph_storage.remote_copy.READ_PAUSES", (0.0,))


@pytest.fixture
def storage() -> Iterator[FlakyStorage]:
    """Return empty storage for URLs such as `flaky://bucket/run`."""
    fsspec.register_implementation("flaky", FlakyStorage, clobber=True)
    FlakyStorage.store.clear()
    FlakyStorage.pseudo_dirs[:] = [""]
    FlakyStorage.failing, FlakyStorage.calls = set(), []
    yield fsspec.filesystem("flaky")
    FlakyStorage.failing = set()
