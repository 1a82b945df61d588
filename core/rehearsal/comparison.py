"""The state of a run, as values that a resumed run must have too, down to the last bit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..checkpoint.state.leaves import Leaf, leaves

KEPT = ("modules", "optimizers", "schedulers", "engine", "task", "progress", "data", "metrics", "means", "plugins")
AT_THE_END = ("modules", "optimizers", "schedulers", "engine", "task", "progress", "plugins")
CLOCKS = ("seconds", "doubts")  # of the progress and of the data


def comparable(state: Mapping[str, Any], plugins: Collection[str], *, at_end: bool = False) -> dict[str, Leaf]:
    """Return every value of a snapshot that does not depend on the clock.

    Args:
        state: the snapshot.
        plugins: the names of those whose states count.
        at_end: whether metrics do not: some are measured with the clock.
    """
    parts: dict[str, Any] = {name: state[name] for name in (AT_THE_END if at_end else KEPT)}
    for name in {"progress", "data"} & parts.keys():
        parts[name] = {key: value for key, value in parts[name].items() if not any(each in key for each in CLOCKS)}
    parts["plugins"] = {name: value for name, value in state["plugins"].items() if name in plugins}
    return leaves(parts)


def first_difference(expected: Mapping[str, Leaf], found: Mapping[str, Leaf]) -> str | None:
    """Return the name of the first value that differs; None where none does."""
    return next((name for name in {**expected, **found} if expected.get(name) != found.get(name)), None)
