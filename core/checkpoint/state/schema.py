"""The schema of a saved state, and of which training and software it is."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from .plain import brief

SCHEMA = 3


REQUIRED = (
    "schema", "run_name", "progress", "modules", "optimizers", "plugins", "metrics", "data", "control", "world",
    "ranks",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of the software that a cut is made with."""
    software = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": str(np.__version__)}
    return {"heliograph": version("heliograph"), **software}


def training_of(saved: Mapping[str, Any]) -> str:
    """Return of which training a cut is."""
    return saved.get("training_id") or training_named(saved["run_name"])


def training_named(run_name: str) -> str:
    """Return the training that all cuts of a name are taken for that were made when trainings had no identity yet."""
    return hashlib.sha256(f"heliograph training {run_name}".encode()).hexdigest()[:32]


def check_schema(saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless a loaded object is a cut that this version reads."""
    schema = saved.get("schema") if isinstance(saved, Mapping) else None
    if isinstance(schema, int) and schema != SCHEMA:
        mend = "update heliograph" if schema > SCHEMA else "run `python -m heliograph checkpoint migrate` on the file"
        raise ValueError(f"The checkpoint has schema {schema}, this version reads {SCHEMA}: {mend}.")
    lacking = [key for key in REQUIRED if key not in saved] if isinstance(saved, Mapping) else list(REQUIRED)
    if lacking:
        raise ValueError(f"This is no checkpoint of heliograph: it lacks {', '.join(lacking)}.")


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
