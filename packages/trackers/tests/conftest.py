"""Trackers without a network, in folders of the tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from heliograph.tests.builtin_callbacks.conftest import (
    _global_generators,
    batches,
    losses,
    scripted,
    sgd,
    task,
    weights,
)

__all__ = ["_global_generators", "batches", "losses", "scripted", "sgd", "task", "weights"]

VARIABLES = (
    *("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT"),
    *("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_STORAGE_MODE"),
)


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def in_folder(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function that gives Trackio's database a folder: it reads TRACKIO_DIR when it is imported."""
    from trackio import utils

    def use(folder: Path) -> None:
        former = utils.TRACKIO_DIR
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "trackio":
                for attribute, value in list(vars(module).items()):
                    if isinstance(value, Path) and value.is_relative_to(former):
                        monkeypatch.setattr(module, attribute, folder / value.relative_to(former))

    return use
