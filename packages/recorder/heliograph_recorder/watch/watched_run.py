"""One recording that is watched: its facts, made again when there is something new."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from ..explain.lineage import Parent, ancestors
from ..format.checksum import parse_line
from ..format.lines import decode
from ..format.reader import Follower, Parser
from ..format.records import AttemptRecord, EventEntry
from ..format.writing_process import writing_process
from ..timeline.page import facts

PAUSE = 0.5  # seconds between two looks at the files
BEGINNING = 2**17  # bytes of a file, in which it says of which training it is a fork
END = 2**17  # bytes of a file, in which it says how the run ended
UNREADABLE = "not a readable recording"
SHARE = 10  # times as long as making the facts took, at least: of long recordings, the watch takes a tenth of a core


class WatchedRun:
    """A recording, and the facts of it.

    Several threads may ask for them.

    Args:
        path: the file.
        name: as it is shown.

    Attributes:
        version: a number that changes when the facts do.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.version = 0
        self._follower, self._guard = Follower(path), Lock()
        self._facts: dict[str, Any] = {}
        self._text = b""
        self._was_running: bool | None = None
        self._parents: list[Parent] | None = None  # None as long as it is not known
        self._training, self._searched = "", -1  # the id, and how much of the file was searched for it
        self._status, self._ended_at = "", -1  # how it ended, and the length of the file in which that was read
        self._due = 0.0

    def facts(self) -> dict[str, Any]:
        """Return what the page shows, or `error`, why that cannot be said."""
        with self._guard:
            self._look()
            return self._facts

    def text(self, known: int = -1) -> tuple[int, bytes]:
        """Return the version of the facts, and the facts as JSON: empty where `known` is that version."""
        with self._guard:
            self._look()
            return self.version, b"" if known == self.version else self._text

    @property
    def parent(self) -> Parent | None:
        """The training that this one is a fork of, None of another; only the beginning of the file is read for it."""
        if self._parents is not None:
            return next(iter(self._parents), None)
        try:
            first, is_known = _first_attempt(self.path)
        except (OSError, ValueError):  # the facts say why
            return None
        found = [] if first is None else ancestors(first)[:1]
        self._parents = found if found or is_known else None
        return next(iter(found), None)

    def is_of(self, training: str) -> bool:
        """Return whether this is the recording of a training, given its id: the checkpoints that it notes have it."""
        try:
            size = self.path.stat().st_size
            if not self._training and size != self._searched:
                self._training, self._searched = _first_training(self.path), size
        except (OSError, ValueError):  # the facts say why
            return False
        return self._training == training

    @property
    def status(self) -> str:
        """How the last attempt ended, `killed` where no line says it; empty where it runs, or that is not known.

        It is `not a readable recording` where the facts have the reason instead. Only the end of the file is read for
        it, and the beginning where the end does not say it.
        """
        if self.is_running is not False:
            return ""
        try:
            size = self.path.stat().st_size
            if size != self._ended_at:
                status = _last_status(self.path, size)
                is_readable = status not in ("killed", "") or _is_readable(self.path)
                self._status, self._ended_at = status if is_readable else UNREADABLE, size
        except OSError:  # it was removed
            return ""
        return self._status

    def _look(self) -> None:
        """Make the facts again if there is anything new."""
        begin = monotonic()
        if begin < self._due:
            return
        is_running = self.is_running
        try:
            if not self._follower.update() and self._text and is_running == self._was_running:
                self._due = monotonic() + PAUSE
                return
            found = facts(self._follower.recording(), is_running=is_running)
        except (OSError, ValueError) as error:
            found = {"error": str(error)}
        self._was_running = is_running
        if found != self._facts:
            self._facts, self.version = found, self.version + 1
            self._text = json.dumps(found, allow_nan=False, separators=(",", ":")).encode()
        self._due = monotonic() + max(PAUSE, SHARE * (monotonic() - begin))

    @property
    def is_running(self) -> bool | None:
        """Whether a process is writing the recording; None if it is one of another machine, which cannot be asked."""
        process = writing_process(self.path)
        return process if process is None else process > 0

    @property
    def process(self) -> int | None:
        """The number of the process that is writing the recording, None if there is none on this machine."""
        return writing_process(self.path) or None


def _last_status(path: Path, size: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, size - END))
        lines = file.read().splitlines()
    for number, line in reversed([*enumerate(lines)]):
        try:
            entry = decode(parse_line(line))
        except ValueError:  # it was killed while it wrote this line, or after an attempt had begun; or the line is cut
            return "killed" if number or size <= END else ""
        if isinstance(entry, EventEntry) and entry.event == "run_closed":
            return str(entry.data["status"])
    return "killed"


def _is_readable(path: Path) -> bool:
    """Return whether a file begins as a recording; an empty one is of a run that was killed before it began."""
    with path.open("rb") as file:
        data = file.read(BEGINNING)
    try:
        Parser(path).add(data, is_end=True)
    except ValueError:  # the facts say why
        return not data
    return True


def _first_training(path: Path) -> str:
    """Return the id of the training that the first checkpoint has, empty for none; the file is read as far as that."""
    parser, length = Parser(path), BEGINNING
    with path.open("rb") as file:
        while True:
            file.seek(parser.size)
            data = file.read(length)
            parser.add(data, is_end=False)
            entries = (entry for each in parser.attempts for entry in each.entries if isinstance(entry, EventEntry))
            found = next((entry.data["training"] for entry in entries if entry.data.get("training")), "")
            if found or len(data) < length:
                return str(found)
            length *= 2


def _first_attempt(path: Path) -> tuple[AttemptRecord | None, bool]:
    """Return the first attempt as far as the beginning of a recording has it, and whether the training has begun."""
    with path.open("rb") as file:
        data = file.read(BEGINNING)
    parser = Parser(path)
    parser.add(data, is_end=False)
    if not parser.attempts:
        return None, False
    first = parser.attempts[0].finish()
    names = {entry.event for entry in first.entries if isinstance(entry, EventEntry)}
    return first, bool(names & {"epoch_start", "run_closed"}) or len(data) == BEGINNING
