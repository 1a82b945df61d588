"""The checkpoints of a recorded run: who asked for each, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....events import Request
from ..format.records import Counters, EventEntry, RequestEntry
from .attempt_summary import Leg


@dataclass(slots=True)
class Save:
    """A checkpoint that was written.

    Attributes:
        leg: the number of its attempt.
        clock: when it was whole, in seconds since the attempt began.
        counters: where the run was then; of a save beside the loop, a little behind what it holds.
        path: the file.
        is_best: whether it was the best when it was written.
        asked: the requests that it serves.
        pruned: where the run was when it was removed, None while it is kept.
        rule: why it was removed.
    """

    leg: int
    clock: float
    counters: Counters
    path: str
    is_best: bool
    asked: tuple[Request, ...]
    pruned: Counters | None = None
    rule: str = ""


def saves_of(found: Sequence[Leg]) -> list[Save]:
    """Return every checkpoint that was told of, in the order of writing."""
    saves: list[Save] = []
    for leg in found:
        requests = {entry.number: entry.request for entry in leg.attempt.entries if isinstance(entry, RequestEntry)}
        points: list[tuple[Counters, tuple[Request, ...]]] = []
        for entry in leg.attempt.entries:
            if not isinstance(entry, EventEntry):
                continue
            if entry.event == "save_point":
                asked = [requests[number] for number in entry.data.get("asked", ()) if number in requests]
                points = [*points[-1:], (entry.counters, tuple(asked))]  # at most one more is still being written
            elif entry.event == "checkpoint_saved":
                place, asked_for = points.pop(0) if points else (entry.counters, ())
                path, is_best = entry.data["path"], entry.data["is_best"]
                saves.append(Save(leg.number, entry.clock, place, path, is_best, asked_for))
            elif entry.event == "checkpoint_pruned":
                _prune(saves, entry)
    return saves


def best_and_last(found: Sequence[Leg], saves: Sequence[Save]) -> tuple[str | None, str | None]:
    """Return the best and the newest checkpoint, as the run said at its end, else as they were told of."""
    for leg in reversed(found):
        ending = leg.ending
        if leg.is_fit and ending is not None and (ending.data["best"] or ending.data["last"]):
            return ending.data["best"], ending.data["last"]
    kept = [save for save in saves if save.pruned is None]
    best = [save.path for save in kept if save.is_best]
    return (best[-1] if best else None), (kept[-1].path if kept else None)


def common_folder(paths: Iterable[str | None]) -> str:
    """Return the folder in which all of these files lie; nothing where it is not one."""
    folders = {str(Path(path).parent) for path in paths if path}
    return folders.pop() if len(folders) == 1 else ""


def within(path: str, folder: str) -> str:
    """Return a file's name where its folder is told elsewhere, else its path."""
    return Path(path).name if folder else path


def _prune(saves: Sequence[Save], entry: EventEntry) -> None:
    for save in reversed(saves):
        if save.path == entry.data["path"] and save.pruned is None:
            save.pruned, save.rule = entry.counters, entry.data["reason"]
            return
