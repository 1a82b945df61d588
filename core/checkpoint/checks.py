"""Checks of a state: its schema, and its values as a tree of plain types; numbers of other types are replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...events.checks import PLAIN
from ..system.extras import kind_of, with_article
from .schema import CONTAINERS, DEPTH, EMPTY, FEW, MAPPINGS, SCHEMA, SEQUENCES, WEIGHTS_ONLY, is_small_and_plain

TIMES = 100  # the most often that more than `FEW` items may be shared, on average
LONGEST = 80  # characters of a value in an error message
REQUIRED = (
    "schema", "run_name", "training_id", "progress", "modules", "optimizers", "plugins", "metrics", "data", "control",
    "world", "ranks",
)  # fmt: skip


def check_schema(saved: Mapping[str, Any]) -> None:
    if isinstance(saved, Mapping) and saved.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(f"The checkpoint has {describe_schema(saved['schema'])}")
    lacking = [key for key in REQUIRED if key not in saved] if isinstance(saved, Mapping) else list(REQUIRED)
    if lacking:
        raise ValueError(f"This is not a checkpoint of heliograph: it lacks {', '.join(lacking)}.")


def describe_schema(schema: object) -> str:
    return f"schema {brief(schema)}, this version reads {SCHEMA}: update heliograph, or use the version that wrote it."


def check_resumable(saved: Mapping[str, Any], path: Path | None) -> None:
    if saved.get(WEIGHTS_ONLY):
        raise ValueError(
            f"{path or 'The state'} holds only weights, as WeightsCheckpoint writes them, without "
            f"optimizer, position and random generators: it cannot be resumed. Set resume= to the path of a full "
            f"checkpoint, or start a new training with these weights: resume=None, and load_weights(task, path)."
        )


def check_plain(value: Any, path: str) -> None:
    if not is_small_and_plain(value):
        _TreeCheck(only_plain=True).check(value, path)


def replace_numbers(value: Any, path: str) -> tuple[Any, Any]:
    """Return a state as plain types and tensors, and the types of its NumPy and complex numbers and empty bytes."""
    check_tree(value, path)
    value, types = _split_numbers(value)
    check_plain(value, path)
    return value, types


def _split_numbers(value: Any) -> tuple[Any, Any]:
    kind = type(value)
    if kind in CONTAINERS:
        keys = list(value) if kind in MAPPINGS else range(len(value))
        split = {_number(key): _split_numbers(value[key]) for key in keys}
        types = {key: of_item for key, (_, of_item) in split.items() if of_item}
        if all(key is new and value[key] is split[new][0] for key, new in zip(keys, split, strict=True)):
            return value, None
        items = {key: item for key, (item, _) in split.items()}
        return kind(items if kind in MAPPINGS else items.values()), types
    if value is EMPTY:
        return "", "bytes"
    number = _number(value)
    if number is value and kind is not complex:
        return value, None
    if isinstance(number, complex):
        return [number.real, number.imag], "complex" if kind is complex else _name(value)
    return number, None if isinstance(number, str | bytes) else _name(value)


def _number(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray) and value.shape == ():
        number = value.item()
        return number if type(number) in (*PLAIN, complex) else value
    return value


def _name(value: np.generic | np.ndarray[Any, Any]) -> str:
    return f"{value.dtype.name}{'[]' * isinstance(value, np.ndarray)}"


def with_numbers(value: Any, types: Any) -> Any:
    """Return a state with the NumPy and complex numbers that `replace_numbers` has replaced.

    Raises:
        ValueError: the checkpoint names a type that is not numeric.
    """
    if not isinstance(types, str):
        present = value if isinstance(value, Mapping) else range(len(value))
        items = {key: with_numbers(value[key], of_item) for key, of_item in (types or {}).items() if key in present}
        if isinstance(value, Mapping):
            value = copy(value)
            value.update(items)
            return value
        return type(value)(items.get(index, item) for index, item in enumerate(value))
    if types == "bytes":
        return EMPTY
    number = complex(*value) if isinstance(value, list) else value
    if types == "complex":
        return number
    dtype = np.dtype(types.removesuffix("[]"))
    if dtype.kind not in "biufc":
        raise ValueError(f"The checkpoint names {types!r} as the type of a number.")
    return np.array(number, dtype) if types.endswith("[]") else dtype.type(number)


def check_tree(value: Any, path: str) -> None:
    # Refused: a container in itself, more than 100 levels, or containers shared so often that a walk visits more than
    # a million items, and more than a hundred times as many as there are.
    _TreeCheck(only_plain=False).check(value, path)


class _TreeCheck:
    def __init__(self, *, only_plain: bool) -> None:
        self._only_plain = only_plain
        self._counts: dict[int, int] = {}  # items in a container and below, by its id; 0 while it is being counted
        self._seen = 1  # items, each once

    def check(self, value: Any, path: str) -> None:
        count = self._count(value, path, DEPTH)
        if count > FEW and count > TIMES * self._seen:
            raise ValueError(f"{path} holds the same lists or dicts again and again, {count:,} items in total.")

    def _count(self, value: Any, path: str, depth: int) -> int:
        if type(value) not in CONTAINERS:
            if self._only_plain and (type(value) not in PLAIN or value is EMPTY) and not isinstance(value, Tensor):
                name = with_article(f"{type(value).__module__}.{type(value).__name__}")
                raise TypeError(
                    f"{path} is {name}: a checkpoint holds plain types and tensors only, so that it loads "
                    f"safely. Convert it in state_dict()."
                )
            return 1
        known_count = self._counts.get(id(value))
        if known_count:
            return known_count
        if known_count == 0:
            raise ValueError(f"{path} holds itself: a state is a tree.")
        if not depth:
            raise ValueError(f"{path[:LONGEST]}... is nested more than {DEPTH} deep.")
        self._counts[id(value)] = 0
        count = 1 + (len(value) if type(value) in SEQUENCES else 2 * len(value))
        self._seen += count - 1
        if not has_plain_items(value):
            for where, item in _items(value, path):
                count += self._count(item, where, depth - 1) - 1
        self._counts[id(value)] = count
        return count


def has_plain_items(value: Any) -> bool:
    # shortcut: lists of a thousand numbers are common
    if type(value) in SEQUENCES:
        return PLAIN.issuperset(map(type, value))
    return EMPTY not in value and PLAIN.issuperset(map(type, value)) and PLAIN.issuperset(map(type, value.values()))


def _items(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if type(value) in SEQUENCES:
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value) if type(item) not in PLAIN)
        return
    for key, item in value.items():
        if type(key) not in PLAIN or key is EMPTY:
            yield f"a key of {path}", key
        if type(item) not in PLAIN:
            yield f"{path}[{brief(key)}]", item


def brief(value: Any) -> str:
    # for messages: only the type of a container, which may be very large
    return repr(value)[:LONGEST] if type(value) in PLAIN else kind_of(value)
