"""What ranks agree on before they read: that their data are the same, and how long an epoch is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...events import Engine
from .sources.contract import Source


class Facts(NamedTuple):
    """What a rank says of a loader."""

    kind: dict[str, Any]
    length: int | None
    even: bool
    as_it_is: bool


def agree(sources: Sequence[Source], engine: Engine, note: Callable[[str], None]) -> None:
    """Let the shortest rank set the length of an epoch for all; unlike batch sizes nobody knows. A collective.

    Args:
        sources: one for each phase.
        engine: connects the ranks.
        note: tells of loaders that every rank reads whole, and of unequal lengths.

    Raises:
        ValueError: the data that are dealt out are not the same on all ranks.
    """
    own = [_facts(source) for source in sources]
    of_ranks: list[list[Facts]] = engine.gather_objects(own)
    if len({len(facts) for facts in of_ranks}) > 1:
        raise ValueError(f"The ranks train in {', '.join(str(len(facts)) for facts in of_ranks)} phases.")
    for source, facts in zip(sources, zip(*of_ranks, strict=True), strict=True):
        if not all(each.as_it_is for each in facts):
            _check_same(facts)
        else:
            note(
                f"a {type(source.loader).__name__} is read as it is on each of {engine.world_size} ranks: share its "
                f"data out by run.engine.rank, or every rank trains on all of it"
            )
        lengths = {each.length for each in facts}
        if len(lengths) > 1:
            told = ", ".join("unknown" if each.length is None else str(each.length) for each in facts)
            note(f"the train loaders of the ranks have {told} batches: an epoch ends when the first of them does")
        source.length = None if None in lengths else min(each.length or 0 for each in facts)
        source.even = all(each.even for each in facts)
        if any(each.kind["batch_size"] != source.batch_size for each in facts):
            source.batch_size = None


def _facts(source: Source) -> Facts:
    return Facts({**source.kind, "batch_size": source.batch_size}, source.length, source.even, source.as_it_is)


def _check_same(facts: Sequence[Facts]) -> None:
    main = facts[0].kind
    for rank, each in enumerate(facts):
        names = [name for name in {**main, **each.kind} if main.get(name) != each.kind.get(name)]
        if names:
            told = ", ".join(f"{name} is {main.get(name)!r} and {each.kind.get(name)!r}" for name in names)
            raise ValueError(
                f"The train loaders of rank 0 and rank {rank} differ: {told}. A run deals the data out itself, so give "
                f"every rank all of them, in batches of one size; to share them out yourself, give an iterable dataset."
            )
