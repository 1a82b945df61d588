"""The checkpoints of a recorded run, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.system.extras import printable
from . import words
from .attempt_summary import Leg
from .saves import Save, best_and_last, common_folder, within
from .sections import Section


def checkpoints_section(found: Sequence[Leg], saves: Sequence[Save]) -> Section:
    """Return every checkpoint with what became of it; a rule that all have in common is told once."""
    if not saves:
        return Section("checkpoints", [])
    best, last = best_and_last(found, saves)
    folder = common_folder([*(save.path for save in saves), best, last])
    rules = {save.rule for save in saves if save.pruned is not None}
    askers = {_askers(save) for save in saves}
    told = words.table([_row(save, folder, len(rules) == 1, len(askers) == 1) for save in saves], right=(0, 1))
    told += [f"  {name}: {printable(within(path, folder))}" for name, path in (("best", best), ("last", last)) if path]
    common = [f"asked for by {asker}" for asker in askers if asker and len(askers) == 1]
    common += [f"pruned since {printable(rule)}" for rule in rules if len(rules) == 1]
    told += [line for each in common for line in words.lines(each)]
    where = f" in {printable(folder)}" if folder else ""
    return Section(words.counted(len(saves), "checkpoint") + where, told)


def checkpoints_in_short(found: Sequence[Leg], saves: Sequence[Save]) -> str:
    """Return how many checkpoints there were, and which are the best and the last."""
    steps = {save.path: f"of step {save.place.steps:,}" for save in saves}
    pruned = sum(save.pruned is not None for save in saves)
    said = [words.counted(len(saves), "checkpoint"), *([f"{pruned:,} pruned"] if pruned else [])]
    pair = zip(("best", "last"), best_and_last(found, saves), strict=True)
    said += [f"{name} {steps.get(path, printable(path))}" for name, path in pair if path]
    return ", ".join(said)


def _row(save: Save, folder: str, one_rule: bool, one_asker: bool) -> tuple[str, str, str, str]:
    said = ["best so far"] if save.is_best else []
    said += [f"for {asker}"] if (asker := _askers(save)) and not one_asker else []
    if save.pruned is not None:
        why = "" if one_rule else f" ({printable(save.rule)})"
        said.append(f"pruned at step {save.pruned.steps}{why}")
    name = printable(within(save.path, folder))
    return f"step {save.place.steps}", f"epoch {save.place.epoch}", name, ", ".join(said)


def _askers(save: Save) -> str:
    return words.listed(sorted({printable(request.by) for request in save.asked}))
