"""What of a recording could not be read, in few lines."""

from __future__ import annotations

from .records import Attempt

SHOWN = 10


def damage_in_short(attempt: Attempt) -> list[str]:
    """Return what of an attempt could not be read: the first ten sentences, then how many more there are."""
    damage = attempt.damage
    return [*damage[:SHOWN], *[f"and {len(damage) - SHOWN:,} more"] * (len(damage) > SHOWN)]
