"""The recordings in the files and folders that a user has named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from ..format.reader import SUFFIX
from .requests import can_be_asked
from .watched_run import WatchedRun

PAUSE, SHARE = 1.0, 20  # between two searches of the folders: seconds, and times as long as one took, at least


class RunList:
    """All recordings in some files and folders, those that are made later included.

    Args:
        paths: recordings, and folders with recordings at any depth; they may be made later.

    Raises:
        ValueError: a file is not named as a recording.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if path.is_file() and path.suffix != SUFFIX:
                raise ValueError(
                    f"{path} is not the name of a recording, which ends with {SUFFIX}: give the file that "
                    "Recorder wrote, or its folder."
                )
        self._paths, self._guard, self._due = paths, Lock(), 0.0
        self._runs: dict[Path, WatchedRun] = {}

    def runs(self) -> list[WatchedRun]:
        """Return the runs; the place of each in the list stays the same."""
        with self._guard:
            if (begin := monotonic()) >= self._due:
                for path in self._paths:
                    self._add(path)
                self._add_parents()
                self._due = monotonic() + max(PAUSE, SHARE * (monotonic() - begin))
            return [*self._runs.values()]

    def missing(self) -> list[str]:
        """Return the absolute paths at which there is nothing yet."""
        return [str(path.absolute()) for path in self._paths if not path.exists()]

    def rows(self) -> list[dict[str, Any]]:
        """Return what the page lists of each run: its number and name, when it was written, its state."""
        rows, runs = [], self.runs()
        for number, run in enumerate(runs):
            if (modified := _modified(run.path)) is None:
                continue
            rows.append(
                {
                    "id": number,
                    "name": run.name,
                    "modified": modified,
                    "running": run.is_running,
                    "status": run.status,
                    "remote": can_be_asked(run),
                    "parent": self._parent_of(run, runs),
                }
            )
        return rows

    def first(self) -> list[int]:
        """Return the runs to show at first: the newest of each file or folder that was named."""
        runs, chosen = self.runs(), list[int]()
        for path in self._paths:
            own = [number for number, run in enumerate(runs) if run.path == path or path in run.path.parents]
            own.sort(key=lambda number: _modified(runs[number].path) or 0.0)
            chosen += [number for number in own[-1:] if number not in chosen]
        return chosen

    @staticmethod
    def _parent_of(run: WatchedRun, runs: Sequence[WatchedRun]) -> dict[str, Any] | None:
        """Return which run another one is a fork of: its number, or None where its recording is not found."""
        if (parent := run.parent) is None:
            return None
        same_path = [number for number, each in enumerate(runs) if str(each.path.absolute()) == parent.recording]
        same_name = [
            number
            for number, each in enumerate(runs)
            if each.path.stem == parent.name
            and each is not run
            and (not parent.training or each.is_of(parent.training))
        ]
        number = next(iter(same_path or same_name), None)  # a folder may have been moved
        name = parent.name if number is None else runs[number].name
        return {"id": number, "name": name, "step": parent.step}

    def _add_parents(self) -> None:
        """Add the trainings that known ones are forks of, where their recordings are elsewhere and still there."""
        waiting, known = list(self._runs.values()), {str(each.absolute()) for each in self._runs}
        while waiting:
            parent = waiting.pop().parent
            path = Path() if parent is None else Path(parent.recording)
            if path.is_absolute() and path.suffix == SUFFIX and str(path) not in known and path.is_file():
                added = self._runs[path] = WatchedRun(path, str(Path(path.parent.name) / path.stem))
                known.add(str(path))
                waiting.append(added)

    def _add(self, path: Path) -> None:
        for file in [path] if path.is_file() else sorted(path.rglob(f"*{SUFFIX}")):
            if file not in self._runs and file.is_file():
                name = file.name if file == path else str(file.relative_to(path))
                if len(self._paths) > 1 and file != path:
                    name = str(Path(path.name) / name)
                self._runs[file] = WatchedRun(file, name.removesuffix(SUFFIX))


def _modified(path: Path) -> float | None:
    """Return when a recording was written, None if it was removed."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
