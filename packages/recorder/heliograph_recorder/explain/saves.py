"""The checkpoints of a recorded run, and the section of a story about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from heliograph.events import Request
from heliograph.spi import printable

from ..format.records import Counters, EventEntry, RequestEntry
from . import words
from .attempt_summary import AttemptSummary
from .words import StorySection


@dataclass(slots=True)
class Save:
    """A checkpoint that was written.

    Attributes:
        attempt: the number of its attempt.
        clock: seconds between the beginning of the attempt and the end of the write.
        counters: the counters at its save point.
        path: the file.
        is_best: whether it was the best checkpoint when it was written.
        requests: the requests that it serves.
        pruned_at: the run's counters when it was removed, None if it was not.
        rule: the reason of the removal.
    """

    attempt: int
    clock: float
    counters: Counters
    path: str
    is_best: bool
    requests: tuple[Request, ...]
    pruned_at: Counters | None = None
    rule: str = ""


def saves_of(attempts: Sequence[AttemptSummary]) -> list[Save]:
    saves: list[Save] = []
    for attempt in attempts:
        requests = {entry.number: entry.request for entry in attempt.attempt.entries if isinstance(entry, RequestEntry)}
        points: list[tuple[Counters, tuple[Request, ...]]] = []
        for entry in attempt.events():
            if entry.event == "save_point":
                served = [requests[number] for number in entry.data.get("asked", ()) if number in requests]
                points = [*points[-1:], (entry.counters, tuple(served))]  # at most one save is still in progress
            elif entry.event == "checkpoint_saved":
                counters, fulfilled = points.pop(0) if points else (entry.counters, ())
                path, is_best = entry.data["path"], entry.data["is_best"]
                saves.append(Save(attempt.number, entry.clock, counters, path, is_best, fulfilled))
            elif entry.event == "checkpoint_pruned":
                _mark_pruned(saves, entry)
    return saves


def best_and_last(attempts: Sequence[AttemptSummary], saves: Sequence[Save]) -> tuple[str | None, str | None]:
    """Return the best and the newest checkpoint according to the last end of an attempt and the saves after it."""
    number, best, last = 0, None, None
    for attempt in attempts:
        ending = attempt.ending
        if attempt.is_fit and ending is not None and (ending.data["best"] or ending.data["last"]):
            number, best, last = attempt.number, ending.data["best"], ending.data["last"]
    newer = [save for save in saves if save.attempt > number and save.pruned_at is None]
    for save in newer:
        best, last = save.path if save.is_best else best, save.path
    return _marked_best(newer) or best, last


def _marked_best(saves: Sequence[Save]) -> str | None:
    """Return the checkpoint that the run's pointer names: a validation after a save may have made it the best."""
    paths = {Path(save.path): save.path for save in saves}
    for folder in {path.parent for path in paths}:
        for pointer in folder.glob("*.best"):
            with suppress(FileNotFoundError):  # a running training moved it
                if (path := folder / pointer.read_text(errors="replace").strip()) in paths:
                    return paths[path]
    return None


def roles_of(attempts: Sequence[AttemptSummary], saves: Sequence[Save]) -> list[str]:
    at = {save.path: index for index, save in enumerate(saves)}  # the last save of a path
    roles: list[list[str]] = [[] for _ in saves]
    for role, path in zip(("best", "last"), best_and_last(attempts, saves), strict=True):
        if path in at:
            roles[at[path]].append(role)
    return [" and ".join(names) for names in roles]


def common_folder(paths: Iterable[str | None]) -> str:
    """Return the folder of all files; empty if there are several."""
    folders = {str(Path(path).parent) for path in paths if path}
    return folders.pop() if len(folders) == 1 else ""


def relative_name(path: str, folder: str) -> str:
    return Path(path).name if folder else path


def _mark_pruned(saves: Sequence[Save], entry: EventEntry) -> None:
    for save in reversed(saves):
        if save.path == entry.data["path"] and save.pruned_at is None:
            save.pruned_at, save.rule = entry.counters, entry.data["reason"]
            return


def checkpoints_section(attempts: Sequence[AttemptSummary], saves: Sequence[Save]) -> StorySection:
    if not saves:
        return StorySection("checkpoints", [])
    best, last = best_and_last(attempts, saves)
    folder = common_folder([*(save.path for save in saves), best, last])
    rows = [_row(save, "best" in role, folder) for save, role in zip(saves, roles_of(attempts, saves), strict=True)]
    lines = words.table(rows, right=(0, 1))
    pair = (("best", best), ("last", last))
    lines += [f"  {name}: {printable(relative_name(path, folder))}" for name, path in pair if path]
    location = f" in {printable(folder)}" if folder else ""
    return StorySection(words.count_things(len(saves), "checkpoint") + location, lines)


def _row(save: Save, is_best_of_run: bool, folder: str) -> tuple[str, str, str, str]:
    texts = ["best so far"] if save.is_best or is_best_of_run else []  # a later validation may have made it the best
    texts += [f"for {names}"] if (names := _requesters(save)) else []
    if save.pruned_at is not None:
        texts.append(f"pruned at step {save.pruned_at.steps} ({printable(save.rule)})")
    name = printable(relative_name(save.path, folder))
    return f"step {save.counters.steps}", f"epoch {save.counters.epoch}", name, ", ".join(texts)


def _requesters(save: Save) -> str:
    return words.join_words(sorted({printable(request.by) for request in save.requests}))
