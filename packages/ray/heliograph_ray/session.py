"""The interface between a run on Ray and its launcher or search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from heliograph import Progress
from heliograph.spi import Entry, current_host

LAUNCHER = "launcher"  # `by` of the notices of `RayLauncher` itself


@dataclass(frozen=True, slots=True)
class Notice:
    """A request from outside that the run saves, stops and exits.

    Attributes:
        by: the requester: `ray`, `tune`, `launcher`.
        reason: the reason, as text.
        deadline: when the machine is taken away, in seconds since 1970; None if unknown, or if it stays.
    """

    by: str
    reason: str
    deadline: float | None = None


class StoredReport(Protocol):
    """The folder of a report in the storage, with checkpoints and their shards.

    Attributes:
        name: its name in notes.
        is_own: whether an earlier process of the same call reported it. A restarted run resumes such a report whatever
            `resume=` of its `Checkpoint` is.
    """

    name: str
    is_own: bool

    def manifests(self) -> dict[str, Entry | ValueError]:
        """Return the manifest of each checkpoint by file name, or its error, without copying the files."""

    def fetch(self, folder: Path) -> None:
        """Copy all files to a local folder."""


class Session(Protocol):
    """Connects a run with the launcher or search that runs it.

    Attributes:
        is_restart: whether an earlier process of the same call failed, or had another number of workers. False after
            the program was started again, because that is another call.
        exit_notice: the notice that ended a run of this process, set on every rank; None without.
    """

    is_restart: bool
    exit_notice: Notice | None

    def report(self, metrics: dict[str, float], folder: Path | None) -> Notice | None:
        """Report metrics and the files in a folder. All ranks call it equally often; the main rank passes the folder.

        Returns:
            A notice if the run must stop, on some ranks or on all.
        """

    def stored_reports(self) -> Sequence[StoredReport]:
        """Return the reports that are still stored, newest first; called on the main rank only."""

    def notice(self) -> Notice | None:
        """Return a notice if this machine will be taken away; cheap, called for every batch."""

    def update_progress(self, run: str, progress: Progress) -> None:
        """Record the progress of the run with this name; cheap, called for every batch."""

    def record_start(self, run: str, progress: Progress, path: Path | None) -> None:
        """Record the start of a run: zero, or the progress of the resumed checkpoint."""


def current_session() -> Session | None:
    """Return the session of this process; None outside of Ray."""
    return getattr(current_host(), "session", None)
