"""The hardware, as plugins see it."""

from __future__ import annotations

from typing import Any, Protocol


class Engine(Protocol):
    """Where a run computes.

    Attributes:
        device: the torch device that modules and batches live on.
        rank: this process among `world_size`, from 0.
        world_size: how many processes train together.
        is_main: whether this process writes files and draws bars.
    """

    device: Any
    rank: int
    world_size: int
    is_main: bool
