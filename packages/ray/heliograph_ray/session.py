"""How a run on Ray talks to what runs it: a worker of the launcher, or a trial of a search."""

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
    """A request from outside the run that it saves, stops and exits.

    Attributes:
        by: who requests it: `ray`, `tune`, `launcher`.
        reason: why, in words.
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
        """Return the manifest of each checkpoint by file name, or why it cannot be used, without copying the rest."""

    def fetch(self, folder: Path) -> None:
        """Copy all files to a local folder."""


class Session(Protocol):
    """Connects a run with what runs it.

    Attributes:
        is_restart: whether an earlier process of the same call ran before: an attempt failed, or had another number of
            workers. False if the program was started again, which is another call.
        exit_notice: the notice on which a run of this process ended; None without.
    """

    is_restart: bool
    exit_notice: Notice | None

    def report(self, metrics: dict[str, float], folder: Path | None) -> Notice | None:
        """Report metrics and the files in a folder. All ranks call it equally often; the main rank gives the folder.

        Returns:
            A notice if the run has to stop; on some ranks or on all.
        """

    def stored_reports(self) -> Sequence[StoredReport]:
        """Return the reports that are still stored, newest first; called on the main rank only."""

    def notice(self) -> Notice | None:
        """Return a notice if this machine is to be taken away; cheap, called for every batch."""

    def record_exit(self, notice: Notice) -> None:
        """Record, on every rank, that the run ended on a notice and not by itself."""

    def update_progress(self, run: str, progress: Progress) -> None:
        """Record the progress of the run with this name; cheap, called for every batch."""

    def record_start(self, run: str, progress: Progress, path: Path | None) -> None:
        """Record where the run with this name starts: at zero, or at the progress of the checkpoint that it resumed."""


def current_session() -> Session | None:
    """Return the session of this process; None outside of Ray."""
    return getattr(current_host(), "session", None)
