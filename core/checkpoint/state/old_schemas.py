"""States of old schemas made new: one function per schema, each says what it changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isinf, nan
from typing import Any

from .plain import brief
from .schema import SCHEMA

State = dict[str, Any]
BEFORE_OURS = -(10**15)  # in the order of writing, what schema 1 wrote comes before all that has a number
BEFORE_ALL = 10 * BEFORE_OURS
ORDER_FROM_1 = (
    "not exact: epochs are shuffled by the seed and the epoch now, so they come in another order than they would have"
)
KEPT = {"saved", "best", "judged_by"}  # the state of Checkpoint in schema 1
FIRST = ("schema", "run_name", "progress", "modules", "plugins", "metrics")  # what every schema required


def migrate_state(state: Mapping[str, Any]) -> tuple[State, list[str]]:
    """Return a state in the present schema, and a sentence for each thing that changed; none where nothing did.

    Args:
        state: a state of any schema; it is not changed.

    Raises:
        ValueError: it is no state of ours, or of a newer schema.
    """
    schema = state.get("schema")
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        raise ValueError(
            f"The state has schema {brief(schema)}, this version migrates 1 to {SCHEMA}: update heliograph, or check "
            f"where the file comes from."
        )
    lacking = [key for key in (*FIRST, "optimizer" if schema < 3 else "optimizers") if key not in state]
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
    return isinstance(schema, int) and 1 <= schema < SCHEMA


def place_of(state: Mapping[str, Any]) -> int:
    """Return the place of a checkpoint of schema 1 in the order of writing, which it kept as a time."""
    return BEFORE_OURS + int(state["saved_at"] * 1000)


def judged(state: Mapping[str, Any], name: str) -> tuple[str, str, float | None] | None:
    """Return by what a checkpoint of schema 1 was among the best: it kept that in its own state, by file names."""
    for own in state["plugins"].values():
        if isinstance(own, Mapping) and own.keys() == KEPT and own["judged_by"]:
            metric, mode = own["judged_by"]
            scores = [score for score, each in own["best"] if each == name]
            if scores:
                value = scores[0] if mode == "min" else -scores[0]
                return metric, mode, nan if isinf(value) else value  # it kept NaN as the worst of all
    return None


def _to_2(state: State) -> list[str]:
    """Change schema 1, in which batches came in torch's own order, one process trained, and no request was kept."""
    phase = state.get("helios", {}).get("datamodule", {}).get("phase", 0)  # only Helios had several
    state["versions"] = state.pop("library", {})
    state["world"] = {"size": 1}
    state["control"] = {"due": [], "end_epoch": False}
    state["data"] = {"seed": None, "phase": phase, "advances": False, "doubts": [], "source": None, "state": {}}
    changes = ["added 'data', 'control' and 'world'; 'library' is called 'versions'", ORDER_FROM_1]
    batch = state["progress"]["batch"]
    if batch:
        changes.append(
            f"not exact: the epoch was left after {batch} batches of another order, so in the rest of it some samples "
            f"come again and others not at all"
        )
    plugins = state["plugins"] = dict(state["plugins"])
    for name, own in plugins.items():  # known by their shape: a plugin may have been registered by any name
        if isinstance(own, Mapping) and own.keys() == {"now", "epoch"}:
            plugins[name] = {**{part: own["now"][part] for part in ("globals", "generator")}, "held": []}
            changes.append(f"plugin {name!r}: kept the random generators, left out those of the loader")
        elif isinstance(own, Mapping) and own.keys() == KEPT:
            plugins[name] = {"since": BEFORE_ALL, "value": None, "value_at": -1}
            changes.append(
                f"plugin {name!r}: which checkpoints there are, and which is the best, is in the manifests now"
            )
    return changes


def _to_3(state: State) -> list[str]:
    """Change schema 2, which had one optimizer and one scheduler, and was written by one process."""
    parts = {"optimizers": state.pop("optimizer"), "schedulers": state.pop("scheduler", None)}
    kinds = {"optimizer_kinds": state.pop("optimizer_kind", None), "scheduler_kinds": state.pop("scheduler_kind", None)}
    for key, value in {**parts, **kinds}.items():
        state.setdefault(key, {} if value is None else {"optimizer": value})  # Helios had several, by name
    state["ranks"] = [{}]
    state["data"] = _laid_out(state["data"])
    return ["optimizer and scheduler are kept by name, as 'optimizer'; added 'ranks', what differs between processes"]


def _laid_out(data: Mapping[str, Any]) -> State:
    """Return a position of schema 2 with its layout, of which the facts of its source held a part."""
    facts = dict(data.get("source") or {})
    facts |= facts.pop("of", {})
    if not facts or facts.get("order") == "RandomSampler":  # one that draws bit by bit, and by other keys now
        return {**data, "source": None}
    batch_size, common = facts.pop("batch_size", None), facts["source"] in ("map", "sequence")
    batch_size = 1 if common and batch_size is None else batch_size
    layout = {"world_size": 1, "ranks": 1, "batch_size": batch_size, "batches": None, "common": common}
    return {**data, "source": facts, "layout": layout}


STEPS: dict[int, Callable[[State], list[str]]] = {1: _to_2, 2: _to_3}
