"""States of old schemas made new: one function per schema, each says what it changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .plain import brief
from .schema import SCHEMA

State = dict[str, Any]
NEEDED = ("schema", "run_name", "progress", "modules", "optimizers", "plugins", "metrics")  # by every schema

STEPS: dict[int, Callable[[State], list[str]]] = {}
"""By the number of a schema, what changes a state of it into the next one, in place, and returns what changed."""


def migrate_state(state: Mapping[str, Any]) -> tuple[State, list[str]]:
    """Return a state in the present schema, and a sentence for each thing that changed; none where nothing did.

    Args:
        state: a state of any schema; it is not changed.

    Raises:
        ValueError: it is no state of ours, or of a schema that this version does not read.
    """
    schema = state.get("schema")
    if not isinstance(schema, int) or not _oldest() <= schema <= SCHEMA:
        raise ValueError(
            f"The state has schema {brief(schema)}, this version reads {_oldest()} to {SCHEMA}: update heliograph, or "
            f"check where the file comes from."
        )
    lacking = [key for key in NEEDED if key not in state]
    if lacking:
        raise ValueError(f"The state says schema {schema}, but lacks {', '.join(lacking)}.")
    migrated, changes = dict(state), []
    for number in range(schema, SCHEMA):
        changes += [f"schema {number} to {number + 1}: {change}" for change in STEPS[number](migrated)]
        migrated["schema"] = number + 1
    return migrated, changes


def is_older(state: Mapping[str, Any]) -> bool:
    """Return whether a state says that it is of an older schema."""
    schema = state.get("schema")
    return isinstance(schema, int) and schema < SCHEMA


def _oldest() -> int:
    return min(STEPS, default=SCHEMA)
