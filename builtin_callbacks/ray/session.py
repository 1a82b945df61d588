"""What a run on Ray may ask of what runs it: a worker of the launcher, or a trial of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...core.host import current_host
from ...events import Progress

LAUNCHER = "launcher"  # who gives the notices of `RayLauncher` itself


@dataclass(frozen=True, slots=True)
class Notice:
    """A word from outside that this run is to leave.

    Attributes:
        by: who says so: `ray`, `tune`, `launcher`.
        reason: why, in words.
        deadline: seconds since the epoch until which the machine stays; None where nobody knows, or it stays.
    """

    by: str
    reason: str
    deadline: float | None = None


class Stored(Protocol):
    """What a report has left in the storage: a folder with checkpoints, their manifests and shards.

    Attributes:
        name: what to call it in a note.
        is_own: whether the call that this process works for has reported it, in an earlier process: a run that is begun
            anew goes on from such a one whatever its `Checkpoint` was told.
    """

    name: str
    is_own: bool

    def manifests(self) -> dict[str, bytes]:
        """Return the small files that end in `.json`, by name; they tell what the rest is, without a copy of it."""

    def fetch(self, folder: Path) -> None:
        """Copy everything in it into a folder."""


class Session(Protocol):
    """The line from a run to what runs it.

    Attributes:
        is_restart: whether this process repeats what the same call has begun before: an earlier attempt failed, or the
            workers are another number. Not where the program was run again, which is another call.
        left: the notice upon which a run here ended, None without.
    """

    is_restart: bool
    left: Notice | None

    def report(self, metrics: dict[str, float], folder: Path | None) -> Notice | None:
        """Report metrics, and what lies in a folder; every rank calls it equally often, the main one gives the folder.

        Returns:
            Whether the run is to stop: on the rank that was told so, or on several.
        """

    def stored(self) -> Sequence[Stored]:
        """Return what was reported and is still there, newest first; asked on the main rank only."""

    def notice(self) -> Notice | None:
        """Return whether this machine is to be taken away; costs next to nothing."""

    def leave(self, notice: Notice) -> None:
        """Remember, on every rank, that the run ended upon a notice, and so is not one that ended by itself."""

    def pulse(self, run: str, progress: Progress) -> None:
        """Take note of where the run of a name is; costs next to nothing, and is told from time to time."""

    def resumed(self, run: str, progress: Progress, path: Path | None) -> None:
        """Tell where the run of a name begins: at zeros, or where the checkpoint is that it goes on from."""


def current_session() -> Session | None:
    """Return the session of this process; None outside of Ray."""
    return getattr(current_host(), "session", None)
