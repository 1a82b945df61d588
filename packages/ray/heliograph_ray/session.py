"""The interface between a run on Ray and its launcher or search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from heliograph import Progress
from heliograph.spi import current_host

from .storage import StoredFolder

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

    def stored_reports(self) -> Sequence[StoredFolder]:
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
