"""What a state may be made of: plain types and tensors, nested like a tree."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor

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
    its items, each counted wherever it is, are more than a million and a hundred times as many as there are.
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
