"""The schema of a saved state, and of which training and software it is."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

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


PLAIN = (bool, int, float, str, bytes, type(None))
MAPPINGS = (dict, OrderedDict, Counter)
SEQUENCES = (list, tuple)
CONTAINERS = (*MAPPINGS, *SEQUENCES)
DEPTH = 100
FEW = 1_000_000  # items: so many may be shared in whatever way
TIMES = 100  # over and over
LONGEST = 80  # characters of a value in an error sentence


def check_plain(value: Any, place: str) -> None:
    """Raise TypeError where a state holds what a safe load would refuse; ValueError where it is no tree."""
    _Tree(only_plain=True).check(value, place)


def check_tree(value: Any, place: str) -> None:
    """Raise ValueError where dicts, lists and tuples are no tree that ends: what walks through them would not.

    One that holds itself is none, nor one nested more than 100 deep, nor one that holds the same lists so often that
    its items, each counted wherever it stands, are more than a million and a hundred times as many as there are.
    """
    _Tree(only_plain=False).check(value, place)


class _Tree:
    def __init__(self, *, only_plain: bool) -> None:
        self._only_plain = only_plain
        self._counts: dict[int, int] = {}  # of all that a container holds, by its id; 0 while that is being counted
        self._met = 1  # items, each once

    def check(self, value: Any, place: str) -> None:
        count = self._count(value, place, DEPTH)
        if count > FEW and count > TIMES * self._met:
            raise ValueError(f"{place} holds the same lists or dicts again and again, {count:,} items in all.")

    def _count(self, value: Any, place: str, depth: int) -> int:
        if type(value) not in CONTAINERS:
            self._check_leaf(value, place)
            return 1
        known = self._counts.get(id(value))
        if known:
            return known
        if known == 0:
            raise ValueError(f"{place} holds itself: a state is a tree.")
        if not depth:
            raise ValueError(f"{place[:LONGEST]}... is nested more than {DEPTH} deep.")
        self._counts[id(value)] = 0
        count = 1
        for where, item in _items(value, place):
            self._met += 1
            count += 1 if type(item) in PLAIN else self._count(item, where, depth - 1)
        self._counts[id(value)] = count
        return count

    def _check_leaf(self, value: Any, place: str) -> None:
        if self._only_plain and type(value) not in PLAIN and not isinstance(value, Tensor):
            raise TypeError(
                f"{place} is a {type(value).__module__}.{type(value).__name__}: a checkpoint holds plain types and "
                f"tensors only, so that it loads safely. Convert it in state_dict()."
            )


def _items(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield what a container holds, keys too, each with its place."""
    if type(value) in SEQUENCES:
        for index, item in enumerate(value):
            yield f"{place}[{index}]", item
        return
    for key, item in value.items():
        yield f"a key of {place}", key
        yield f"{place}[{brief(key)}]", item


def brief(value: Any) -> str:
    """Return a value as an error sentence shows it: of a container only its type, for it may be very large."""
    return repr(value)[:LONGEST] if type(value) in PLAIN else f"a {type(value).__name__}"
