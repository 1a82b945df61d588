"""What a resume is worth, as data."""

from __future__ import annotations

from typing import Literal, get_args

Guarantee = Literal["exact", "order-exact", "replayed", "not exact"]
LEVELS: tuple[Guarantee, ...] = get_args(Guarantee)


def weaker(one: Guarantee, other: Guarantee) -> Guarantee:
    """Return the lesser of two guarantees."""
    return max(one, other, key=LEVELS.index)


def verified(steps: int) -> str:
    """Return how many steps were done again and found equal: `verified: 37 repeated steps equal, bit for bit`."""
    return f"verified: {steps:,} repeated step{'' if steps == 1 else 's'} equal, bit for bit"
