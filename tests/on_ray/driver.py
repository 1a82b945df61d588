"""A process that calls the launcher, and is killed meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

import heliograph as h
from heliograph.builtin_callbacks.ray.launcher.attempts import RayValues
from heliograph.tests.on_ray.surviving import Story, train

HELD_AT = 20


def story(folder: Path) -> Story:
    """Return what is trained; both processes tell the same one."""
    return Story(folder, holds=((HELD_AT, 2),), resume="auto")


def call(folder: Path, address: str) -> RayValues:
    """Call the launcher, the same way in each process."""
    launcher = h.RayLauncher(2, storage_path=folder / "storage", name="driver", address=address)
    return launcher.run(train, story(folder))


if __name__ == "__main__":
    call(Path(sys.argv[1]), sys.argv[2])
