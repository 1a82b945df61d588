"""The ranking of checkpoints: which are the best, and which may be removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.checkpoint.storage import reader
from ...core.checkpoint.storage.manifest import Entry, Mode, best_first, pointer_path


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a checkpoint stays; None if it may be removed."""

    entry: Entry
    stays: str | None


def judge(
    entries: Sequence[Entry],
    is_pinned: Callable[[Path], bool],
    *,
    keep_last: int,
    keep_best: int = 0,
    monitor: str | None = None,
    mode: Mode = "min",
) -> list[Verdict]:
    """Return a verdict on each checkpoint. Only intact ones count; damaged ones stay, to be inspected.

    Args:
        entries: the checkpoints of a training, newest first.
        is_pinned: whether a checkpoint is pinned; pinned ones do not count among the newest.
        keep_last: how many of the newest stay, at least one.
        keep_best: how many of the best by `monitor` stay as well.
        monitor: a metric.
        mode: whether smaller or larger is better.
    """
    reasons = dict.fromkeys(_pointed(entries), "called the best by its run")
    reasons |= {each.path: "pinned" for each in entries if is_pinned(each.path)}
    loose = [each for each in entries if reasons.get(each.path) != "pinned"]
    _keep(loose, keep_last, "among the newest", reasons)
    if monitor is not None:
        _keep(ranked(entries, monitor, mode), keep_best, f"among the best by {monitor}", reasons)
    return [Verdict(each, reasons.get(each.path)) for each in entries]


def ranked(entries: Sequence[Entry], monitor: str, mode: Mode) -> list[Entry]:
    """Return the checkpoints that have a metric, the best first; NaN is the worst, of equals the earlier is better.

    If a run monitored this metric, only the checkpoints count that it judged by it.
    """
    judged = {each: each.judged_by[2] for each in entries if each.judged_by and each.judged_by[0] == monitor}
    return best_first(judged or {each: each.metrics.get(monitor) for each in entries}, mode)


def _keep(entries: Sequence[Entry], number: int, reason: str, reasons: dict[Path, str]) -> None:
    """Add a reason to stay for the first intact checkpoints, and another for the damaged ones before them."""
    for entry in entries:
        if number == 0:
            return
        try:
            reader.check(entry.path)
        except (OSError, ValueError) as error:
            reasons[entry.path] = f"damaged, look at it: {error}"
        else:
            reasons.setdefault(entry.path, reason)
            number -= 1


def _pointed(entries: Sequence[Entry]) -> list[Path]:
    """Return the checkpoint that the run calls its best."""
    for each in entries[:1]:
        name = reader.read_pointer(pointer_path(each.path.parent, each.run_name, "best"))
        return [other.path for other in entries if other.path.name == name]
    return []


def by_training(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Return the checkpoints grouped by training, in the given order."""
    trainings: dict[str, list[Entry]] = {}
    for each in entries:
        trainings.setdefault(each.training, []).append(each)
    return list(trainings.values())
