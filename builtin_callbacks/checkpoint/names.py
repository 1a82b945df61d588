"""The name under which a training writes: none that another training in the folder has."""

from __future__ import annotations

import logging
from itertools import count
from typing import Literal

from ...core.checkpoint.storage import Entry, Store
from ...events import Run

OnExisting = Literal["new_name", "refuse", "replace"]
ON_EXISTING: tuple[OnExisting, ...] = ("new_name", "refuse", "replace")
logger = logging.getLogger("heliograph")


def warn_without_saver(run: Run, what: str) -> None:
    """Warn of a plugin that has no effect, as no plugin writes checkpoints."""
    if not any(callable(getattr(each, "where_saved", None)) for each in run.plugins):
        run.warn(f"{what} has no effect: no plugin writes checkpoints. Register Checkpoint(folder).")


def claim_name(store: Store, training_id: str, wanted: str, on_existing: OnExisting) -> tuple[list[str], list[Entry]]:
    """Let a store write for a training, under the wanted name unless that is another's.

    Returns:
        What there is to say, and the checkpoints of others that go as soon as one of this training is written.

    Args:
        store: an open one.
        training_id: the training.
        wanted: the name.
        on_existing: what to do where the name is another training's.

    Raises:
        ValueError: it is, and that is to be refused; or another process writes under the name.
    """
    known, unknown, number = store.under(wanted)
    others = [each for each in known if each.training != training_id]
    is_own = len(known) > len(others) or all(each.head and each.head.training == training_id for each in unknown)
    if is_own and not others:
        store.write_as(training_id, wanted)
        return [], []
    newest = max(others, key=lambda each: each.order, default=None)
    what = "without a manifest that can be used" if newest is None else f"in all, the newest is {newest.path.name}"
    there = f"{store.folder} holds another training under the name {wanted!r} ({number} {what})"
    if on_existing == "refuse":
        raise ValueError(
            f"{there}, and on_existing='refuse'. Continue it, resume='auto'; give this run another name= or folder; "
            f"or choose on_existing='new_name', which leaves it there and numbers the name of this one, or 'replace', "
            f"which removes it when the first checkpoint of this one is written."
        )
    if on_existing == "replace":
        store.write_as(training_id, wanted)
        others = [each for each in store.entries()[0] if each.run_name == wanted and each.training != training_id]
        removable = [each for each in others if each.is_removable]
        note = f"{there}: it is removed when the first checkpoint of this one is written, on_existing='replace'"
        if len(removable) < len(others):
            note += f"; {len(others) - len(removable)} stay, which were renamed or written by Helios"
        others = removable
    else:
        name = _take_free_name(store, training_id, wanted)
        others, note = [], f"{there}: it stays, and this one is written as {name!r}"
    logger.warning(note)
    return [note], others


def _take_free_name(store: Store, training_id: str, wanted: str) -> str:
    for number in count(2):
        name = f"{wanted}-{number}"
        known, _, number = store.under(name)
        if number > len(known) or any(each.training != training_id for each in known):
            continue
        try:
            store.write_as(training_id, name)
        except ValueError:  # of another process, which has not saved yet
            continue
        return name
    raise AssertionError
