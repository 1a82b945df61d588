"""A process that calls the launcher, and is killed during the call."""

from __future__ import annotations

import sys
from pathlib import Path

from heliograph.packages.ray.tests.on_ray.fault_runs import Scenario, train
from heliograph_ray import RayLauncher
from heliograph_ray.launcher.attempts import RayValues

HELD_AT = 20


def scenario(folder: Path) -> Scenario:
    """Return the scenario, which is the same in both processes."""
    return Scenario(folder, holds=((HELD_AT, 2),), resume="auto")


def call(folder: Path, address: str) -> RayValues:
    """Call the launcher, in the same way in both processes."""
    launcher = RayLauncher(2, storage_path=folder / "storage", name="driver", address=address)
    return launcher.run(train, scenario(folder))


if __name__ == "__main__":
    call(Path(sys.argv[1]), sys.argv[2])
