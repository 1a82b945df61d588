"""The watched runs: recordings in files and folders, and what the page shows of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from ..explain.attempt_summary import Parent, ancestors
from ..explain.facts import facts_of
from ..format.lines import decode, parse_line
from ..format.reader import SUFFIX, Follower, Parser, read, writing_process
from ..format.records import AttemptRecord, EventEntry
from ..remote.sockets import sockets_in
from ..timeline.page import facts

LIST_PAUSE, LIST_SHARE = 1.0, 20  # between two scans of the folders: seconds, and times the length of a scan, at least
PAUSE, SHARE = 0.5, 10  # between two updates of the facts: likewise, so that a long recording takes a tenth of a core
BEGINNING = 2**17  # bytes of a file that name the parent of a fork
END = 2**17  # bytes of a file that say how the run ended
UNREADABLE = "not a readable recording"


class WatchedRun:
    """A recording, and the facts that a page shows of it. Thread-safe.

    Args:
        path: the file.
        name: as shown.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._version = 0
        self._follower, self._guard = Follower(path), Lock()
        self._facts: dict[str, Any] = {}
        self._was_running: bool | None = None
        self._parents: list[Parent] | None = None  # None until read
        self._status, self._status_size = "", -1
        self._next_update = 0.0

    def facts(self) -> dict[str, Any]:
        """Return what the page shows, or `error`."""
        return self.versioned_facts()[1]

    def versioned_facts(self) -> tuple[int, dict[str, Any]]:
        """Return the facts, and a number that changes with them."""
        with self._guard:
            self._update()
            return self._version, self._facts

    def recorded_facts(self) -> dict[str, Any]:
        """Return the facts of the command `status`, or the recording and its `error`."""
        try:
            return facts_of(read(self.path), is_running=self.is_running)
        except (OSError, ValueError) as error:
            return {"recording": str(self.path), "error": str(error)}

    @property
    def parent(self) -> Parent | None:
        """The parent of a fork; only the beginning of the file is read."""
        if self._parents is not None:
            return next(iter(self._parents), None)
        try:
            first, is_complete = _first_attempt(self.path)
        except (OSError, ValueError):  # the facts have the error
            return None
        parents = [] if first is None else ancestors(first)[:1]
        self._parents = parents if parents or is_complete else None
        return next(iter(parents), None)

    @property
    def status(self) -> str:
        """How the last attempt ended: its status, `killed`, or `not a readable recording`; empty while it runs.

        Only the end of the file is read, and sometimes the beginning.
        """
        if self.is_running is not False:
            return ""
        try:
            size = self.path.stat().st_size
            if size != self._status_size:
                status = _last_status(self.path, size)
                if size and status in ("killed", ""):
                    _first_attempt(self.path)
                self._status, self._status_size = status, size
        except OSError:  # the file was removed
            return ""
        except ValueError:  # the facts have the error
            self._status, self._status_size = UNREADABLE, size
        return self._status

    def _update(self) -> None:
        begin = monotonic()
        if begin < self._next_update:
            return
        is_running = self.is_running
        try:
            if not self._follower.update() and self._facts and is_running == self._was_running:
                self._next_update = monotonic() + PAUSE
                return
            new = facts(self._follower.recording(), is_running=is_running)
        except (OSError, ValueError) as error:
            new = {"error": str(error)}
        self._was_running = is_running
        if new != self._facts:
            self._facts, self._version = new, self._version + 1
        self._next_update = monotonic() + max(PAUSE, SHARE * (monotonic() - begin))

    @property
    def is_running(self) -> bool | None:
        """True while a process writes the recording; None for a recording of another machine."""
        process = writing_process(self.path)
        return process if process is None else process > 0

    @property
    def process(self) -> int | None:
        """The id of the process of this machine that writes the recording."""
        return writing_process(self.path) or None

    @property
    def accepts_requests(self) -> bool:
        """True if the run is active on this machine, with a socket in the folder of its recording."""
        return self.process is not None and bool(sockets_in(self.path.parent))


class RunList:
    """All recordings in files and folders, which may be created later.

    Args:
        paths: recordings, and folders with recordings at any depth.

    Raises:
        ValueError: the name of a file is not the name of a recording.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if path.is_file() and path.suffix != SUFFIX:
                raise ValueError(
                    f"{path} is not a recording: the name must end with {SUFFIX}. Give the file that Recorder wrote, "
                    "or its folder."
                )
        self._paths, self._guard, self._next_scan = paths, Lock(), 0.0
        self._runs: dict[Path, WatchedRun] = {}

    def runs(self) -> list[WatchedRun]:
        """Return the runs; new ones are appended."""
        with self._guard:
            if (begin := monotonic()) >= self._next_scan:
                for path in self._paths:
                    self._scan(path)
                self._add_parents()
                self._next_scan = monotonic() + max(LIST_PAUSE, LIST_SHARE * (monotonic() - begin))
            return [*self._runs.values()]

    def missing(self) -> list[str]:
        """Return the absolute paths that do not exist yet."""
        return [str(path.absolute()) for path in self._paths if not path.exists()]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each run that the page lists."""
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
                    "remote": run.accepts_requests,
                    "parent": self._parent_of(run, runs),
                }
            )
        return rows

    def first(self) -> list[int]:
        """Return the runs to show initially: the newest of each file or folder."""
        runs, chosen = self.runs(), list[int]()
        for path in self._paths:
            numbers = [number for number, run in enumerate(runs) if run.path == path or path in run.path.parents]
            numbers.sort(key=lambda number: _modified(runs[number].path) or 0.0)
            chosen += [number for number in numbers[-1:] if number not in chosen]
        return chosen

    @staticmethod
    def _parent_of(run: WatchedRun, runs: Sequence[WatchedRun]) -> dict[str, Any] | None:
        """Return the parent of a fork, with the number of its run if its recording is in the list."""
        if (parent := run.parent) is None:
            return None
        candidates = list(enumerate(runs))
        matches = [number for number, candidate in candidates if str(candidate.path.absolute()) == parent.recording]
        matches = matches or [  # a folder may have been moved
            number for number, candidate in candidates if candidate.path.stem == parent.name and candidate is not run
        ]
        number = next(iter(matches), None)
        name = parent.name if number is None else runs[number].name
        return {"id": number, "name": name, "step": parent.step}

    def _add_parents(self) -> None:
        """Add the parents of forks, if their recordings exist elsewhere."""
        waiting, paths = list(self._runs.values()), {str(path.absolute()) for path in self._runs}
        while waiting:
            parent = waiting.pop().parent
            path = Path() if parent is None else Path(parent.recording)
            if path.is_absolute() and path.suffix == SUFFIX and str(path) not in paths and path.is_file():
                added = self._runs[path] = WatchedRun(path, str(Path(path.parent.name) / path.stem))
                paths.add(str(path))
                waiting.append(added)

    def _scan(self, path: Path) -> None:
        for file in [path] if path.is_file() else sorted(path.rglob(f"*{SUFFIX}")):
            if file not in self._runs and file.is_file():
                name = file.name if file == path else str(file.relative_to(path))
                if len(self._paths) > 1 and file != path:
                    name = str(Path(path.name) / name)
                self._runs[file] = WatchedRun(file, name.removesuffix(SUFFIX))


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # the file was removed
        return None


def _last_status(path: Path, size: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, size - END))
        lines = file.read().splitlines()
    for number, line in reversed([*enumerate(lines)]):
        try:
            entry = decode(parse_line(line))
        except ValueError:  # cut by a kill, the beginning of an attempt, or the line at the cut of `END`
            return "killed" if number or size <= END else ""
        if isinstance(entry, EventEntry) and entry.event == "run_closed":
            return str(entry.data["status"])
    return "killed"


def _first_attempt(path: Path) -> tuple[AttemptRecord | None, bool]:
    """Return the part of the first attempt in the beginning of a file, and whether its training has begun."""
    with path.open("rb") as file:
        data = file.read(BEGINNING)
    parser = Parser(path)
    parser.add(data, is_end=True)
    if not parser.attempts:
        return None, False
    first = parser.attempts[0].finish()
    names = {entry.event for entry in first.entries if isinstance(entry, EventEntry)}
    return first, bool(names & {"epoch_start", "run_closed"}) or len(data) == BEGINNING
