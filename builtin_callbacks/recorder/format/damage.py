"""A summary of what could not be read of a recording."""

from __future__ import annotations

from collections.abc import Iterable

from .records import AttemptRecord

SHOWN = 10


def damage_in_short(attempt: AttemptRecord) -> list[str]:
    """Return what could not be read of an attempt: the first ten sentences, then how many more there are."""
    damage = attempt.damage
    return [*damage[:SHOWN], *[f"and {len(damage) - SHOWN:,} more"] * (len(damage) > SHOWN)]


def damage_of(attempts: Iterable[AttemptRecord]) -> list[str]:
    """Return what could not be read of a recording, each with the number of its attempt."""
    return [f"attempt {number}: {text}" for number, each in enumerate(attempts, 1) for text in damage_in_short(each)]
