"""Find the first difference between the facts of two runs, and describe it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from heliograph.spi import Leaf

    from .facts import Fact

WORDS = {
    "draws": "random state",
    "modules": "weights",
    "means": "running means",
    "data": "loader's position",
    "task": "task's own state",
    "control": "pending requests",
}
MAY_VARY = ("metrics", "means", "plugin")
Aside = Collection[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two runs.

    Attributes:
        what: `batch`, `draws`, `loss`, `metrics`, `modules`, `optimizer`, `scheduler`, `plugin <name>`, `progress` or
            another part of a checkpoint by its name there; `order` if one run did what the other did not.
        epoch: finished epochs.
        batch: batches of the epoch, with the current one.
        step: optimizer steps.
        path: which value of it, such as `model.0.weight`.
        text: a sentence.
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
    """The result of comparing two runs.

    Attributes:
        first: the first difference that counts, None if there is none.
        draws: the first difference of the random state up to there. It does not count by itself: if anything is drawn
            from the state, later facts differ.
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
        other: the facts of one that should equal it.
        names: what to call the two runs.
        whole: whether the other came to its end, so that the reference may have no more facts.
        aside: (what, path) of values that are not compared.
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
        found = _difference(expected, fact, paths, names)
        if fact.what != "draws":
            return Comparison(found, draws, batches)
        draws = draws or found
    return Comparison(None, draws, batches)


def varying(one: Sequence[Fact], other: Sequence[Fact]) -> frozenset[tuple[str, str]]:
    """Return (what, path) of the metrics and plugin states that differ between two runs."""
    pairs = zip(one, other, strict=False)
    return frozenset(
        (fact.what, path)
        for fact, twin in pairs
        if fact.what.split()[0] in MAY_VARY and fact.what == twin.what
        for path in _differing(fact, twin, ())
    )


def _differing(one: Fact, other: Fact, aside: Aside) -> Iterator[str]:
    for path in {**one.leaves, **other.leaves}:
        is_aside = (one.what, path) in aside or (one.what, "") in aside
        if not is_aside and one.leaves.get(path) != other.leaves.get(path):
            yield path


def _difference(one: Fact, other: Fact, paths: Sequence[str], names: tuple[str, str]) -> Difference:
    if one.what == "draws":
        generators = ", ".join(dict.fromkeys(path.split(".")[0] for path in paths))
        return Difference(one.what, *other.counters, paths[0], f"{_words(one)} ({generators}) differs {one.when}")
    path = paths[0]
    text = f"{_words(one)}{path and f' ({path})'} differ{'' if _is_plural(one) else 's'} {one.when}"
    values = _values(one.leaves.get(path), other.leaves.get(path), names)
    return Difference(one.what, *other.counters, path, f"{text}: {values}")


def _out_of_order(one: Fact | None, other: Fact | None, names: tuple[str, str]) -> Difference:
    texts = [
        f"{name} has {_words(fact)} {fact.when}" if fact else f"{name} has ended"
        for name, fact in zip(names, (one, other), strict=True)
    ]
    where = other or one
    assert where is not None
    return Difference("order", *where.counters, "", f"what happens differs: {texts[0]}, {texts[1]}")


def _words(fact: Fact) -> str:
    if fact.what.startswith("plugin "):
        return f"the state of plugin {fact.what.removeprefix('plugin ')!r}"
    return f"the {WORDS.get(fact.what, fact.what)}"


def _is_plural(fact: Fact) -> bool:
    return fact.what in ("metrics", "modules", "means", "control")


def _values(one: Leaf | None, other: Leaf | None, names: tuple[str, str]) -> str:
    """Return both values, or how much they differ."""
    if one is not None and other is not None and one.kind == other.kind and np.size(one.sample) > 1:
        return f"{_distance(one.sample, other.sample)} ({one.kind})"
    return ", ".join(f"{_value(leaf)} in {name}" for leaf, name in zip((one, other), names, strict=True))


def _value(leaf: Leaf | None) -> str:
    if leaf is None:
        return "nothing"
    if np.size(leaf.sample) > 1:
        return leaf.kind
    shown = repr(_number(leaf))
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


def _number(leaf: Leaf | None) -> Any:
    """Return a scalar as a Python number."""
    sample = None if leaf is None else leaf.sample
    return sample.item() if isinstance(sample, np.ndarray) and sample.size == 1 else sample


def _distance(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> str:
    with np.errstate(invalid="ignore"):
        distances = np.abs(one - other)
    finite = distances[np.isfinite(distances)]
    if finite.size and finite.max() > 0:
        return f"by up to {finite.max():.3g}"
    return "in some bits"
