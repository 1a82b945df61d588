"""Find the first difference between the facts of two runs, and put it into words."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from heliograph.builtin_callbacks.checkpoint.repeated.ring_buffer import Row
from heliograph.builtin_callbacks.checkpoint.repeated.words import told_apart, what_differs

if TYPE_CHECKING:
    from heliograph.testing.resume.facts import Fact, Leaf

WORDS = {
    "draws": "random state",
    "modules": "weights",
    "means": "running means",
    "data": "loader's position",
    "task": "task's own state",
    "control": "requests that still stand",
}
MAY_VARY = ("metrics", "means", "plugin")
Aside = Collection[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that two runs do not have in common.

    Attributes:
        what: `batch`, `draws`, `loss`, `metrics`, `modules`, `optimizer`, `scheduler`, `plugin <name>`, `progress` or
            another part of a checkpoint by its name there; `order` where one run did what the other did not.
        epoch: finished epochs.
        batch: batches of the epoch, the one in hand included.
        step: optimizer steps.
        path: which value of it, such as `model.0.weight`.
        text: a sentence for people.
    """

    what: str
    epoch: int
    batch: int
    step: int
    path: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out of comparing two runs.

    Attributes:
        first: the first difference that counts, None where there is none.
        draws: the first difference of the random state up to there. By itself it does no harm: what counts is whether
            anything was drawn from it, and that shows in what follows.
        batches: how many batches were compared.
    """

    first: Difference | None
    draws: Difference | None
    batches: int


def compare(
    reference: Sequence[Fact], other: Sequence[Fact], *, names: tuple[str, str], whole: bool = True, aside: Aside = ()
) -> Comparison:
    """Compare two runs, fact by fact.

    Args:
        reference: the facts of a run.
        other: the facts of one that should be its equal.
        names: what to call the two runs.
        whole: whether the other came to its end, so that the reference must hold no more than it does.
        aside: (what, path) of values that are left out.
    """
    draws: Difference | None = None
    batches = 0
    for index in range(max(len(reference), len(other)) if whole else len(other)):
        expected, fact = (each[index] if index < len(each) else None for each in (reference, other))
        if expected is None or fact is None or (expected.what, expected.when) != (fact.what, fact.when):
            return Comparison(_out_of_order(expected, fact, names), draws, batches)
        batches += fact.what == "draws"
        paths = list(_differing(expected, fact, aside))
        if not paths:
            continue
        found = _in_words(expected, fact, paths, names)
        if fact.what != "draws":
            return Comparison(found, draws, batches)
        draws = draws or found
    return Comparison(None, draws, batches)


def varying(one: Sequence[Fact], other: Sequence[Fact]) -> frozenset[tuple[str, str]]:
    """Return (what, path) of the metrics and plugin states that differ between two runs of the same facts."""
    pairs = zip(one, other, strict=False)
    return frozenset(
        (fact.what, path)
        for fact, twin in pairs
        if fact.what.split()[0] in MAY_VARY and fact.what == twin.what
        for path in _differing(fact, twin, ())
    )


def _differing(one: Fact, other: Fact, aside: Aside) -> Iterator[str]:
    for path in {**one.leaves, **other.leaves}:
        left_out = (one.what, path) in aside or (one.what, "") in aside
        if not left_out and one.leaves.get(path) != other.leaves.get(path):
            yield path


def _in_words(one: Fact, other: Fact, paths: Sequence[str], names: tuple[str, str]) -> Difference:
    if one.what == "draws":
        generators = ", ".join(dict.fromkeys(path.split(".")[0] for path in paths))
        return Difference(one.what, *other.place, paths[0], f"{_words(one)} ({generators}) differs {one.when}")
    path = paths[0]
    text = f"{_words(one)}{path and f' ({path})'} differ{'' if _is_plural(one) else 's'} {one.when}"
    values = _values(one.leaves.get(path), other.leaves.get(path), names)
    return Difference(one.what, *other.place, path, f"{text}: {values}")


def _out_of_order(one: Fact | None, other: Fact | None, names: tuple[str, str]) -> Difference:
    texts = [
        f"{name} has {_words(fact)} {fact.when}" if fact else f"{name} has come to its end"
        for name, fact in zip(names, (one, other), strict=True)
    ]
    where = other or one
    assert where is not None
    return Difference("order", *where.place, "", f"what happens differs: {texts[0]}, {texts[1]}")


def _words(fact: Fact) -> str:
    if fact.what.startswith("plugin "):
        return f"the state of plugin {fact.what.removeprefix('plugin ')!r}"
    return f"the {WORDS.get(fact.what, fact.what)}"


def _is_plural(fact: Fact) -> bool:
    return fact.what in ("metrics", "modules", "means", "control")


def _values(one: Leaf | None, other: Leaf | None, names: tuple[str, str]) -> str:
    """Return how two values differ: both, or by how much."""
    if one is not None and other is not None and isinstance(one.glimpse, Row) and isinstance(other.glimpse, Row):
        return what_differs(one.glimpse, other.glimpse)
    if one is not None and other is not None and one.kind == other.kind and np.size(one.glimpse) > 1:
        return f"{_distance(one.glimpse, other.glimpse)} ({one.kind})"
    shown = _value(one), _value(other)
    numbers = [_number(leaf) for leaf in (one, other)]
    if isinstance(numbers[0], float) and isinstance(numbers[1], float):
        shown = told_apart(numbers[0], numbers[1])
    return ", ".join(f"{value} in {name}" for value, name in zip(shown, names, strict=True))


def _value(leaf: Leaf | None) -> str:
    if leaf is None:
        return "nothing"
    if np.size(leaf.glimpse) > 1:
        return leaf.kind
    shown = repr(_number(leaf))
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


def _number(leaf: Leaf | None) -> Any:
    """Return a scalar as Python's own."""
    glimpse = None if leaf is None else leaf.glimpse
    return glimpse.item() if isinstance(glimpse, np.ndarray) and glimpse.size == 1 else glimpse


def _distance(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> str:
    with np.errstate(invalid="ignore"):
        distances = np.abs(one - other)
    finite = distances[np.isfinite(distances)]
    if finite.size and finite.max() > 0:
        return f"by up to {finite.max():.3g}"
    return "in some bits"
