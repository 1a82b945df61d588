"""A summary of what could not be read of a recording."""

from __future__ import annotations

from .records import AttemptRecord

SHOWN = 10


def damage_in_short(attempt: AttemptRecord) -> list[str]:
    """Return what could not be read of an attempt: the first ten sentences, then how many more there are."""
    damage = attempt.damage
    return [*damage[:SHOWN], *[f"and {len(damage) - SHOWN:,} more"] * (len(damage) > SHOWN)]
