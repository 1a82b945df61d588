"""Sentences on the checkpoints of a recorded run."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph.spi import printable

from . import words
from .attempt_summary import AttemptSummary
from .saves import Save, best_and_last, common_folder, relative_name, roles_of
from .words import Section


def checkpoints_section(attempts: Sequence[AttemptSummary], saves: Sequence[Save]) -> Section:
    if not saves:
        return Section("checkpoints", [])
    best, last = best_and_last(attempts, saves)
    folder = common_folder([*(save.path for save in saves), best, last])
    rules = {save.rule for save in saves if save.pruned_at is not None}
    requesters = {_requesters(save) for save in saves}
    rows = [
        _row(save, "best" in role, folder, len(rules) == 1, len(requesters) == 1)
        for save, role in zip(saves, roles_of(attempts, saves), strict=True)
    ]
    lines = words.table(rows, right=(0, 1))
    pair = (("best", best), ("last", last))
    lines += [f"  {name}: {printable(relative_name(path, folder))}" for name, path in pair if path]
    common = [f"requested by {names}" for names in requesters if names and len(requesters) == 1]
    common += [f"pruned: {printable(rule)}" for rule in rules if len(rules) == 1]
    lines += [line for text in common for line in words.lines(text)]
    where = f" in {printable(folder)}" if folder else ""
    return Section(words.count_things(len(saves), "checkpoint") + where, lines)


def checkpoints_in_short(attempts: Sequence[AttemptSummary], saves: Sequence[Save]) -> str:
    steps = {save.path: f"of step {save.counters.steps:,}" for save in saves}
    pruned = sum(save.pruned_at is not None for save in saves)
    texts = [words.count_things(len(saves), "checkpoint"), *([f"{pruned:,} pruned"] if pruned else [])]
    pair = zip(("best", "last"), best_and_last(attempts, saves), strict=True)
    texts += [f"{name} {steps.get(path, printable(path))}" for name, path in pair if path]
    return ", ".join(texts)


def _row(save: Save, is_the_best: bool, folder: str, one_rule: bool, one_requester: bool) -> tuple[str, str, str, str]:
    texts = ["best so far"] if save.is_best or is_the_best else []  # a validation after it may have judged it
    texts += [f"for {names}"] if (names := _requesters(save)) and not one_requester else []
    if save.pruned_at is not None:
        why = "" if one_rule else f" ({printable(save.rule)})"
        texts.append(f"pruned at step {save.pruned_at.steps}{why}")
    name = printable(relative_name(save.path, folder))
    return f"step {save.counters.steps}", f"epoch {save.counters.epoch}", name, ", ".join(texts)


def _requesters(save: Save) -> str:
    return words.join_words(sorted({printable(request.by) for request in save.requests}))
