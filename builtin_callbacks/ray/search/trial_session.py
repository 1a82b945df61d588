"""The session of a trial: Tune gets its reports, and stops it by way of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....core.system.extras import require
from ....events import Progress
from ....events.checks import known_names
from ..session import Notice
from .pbt import Tune

if TYPE_CHECKING:
    from ....core.result import RunResult
    from ....plugins import Plugins
    from ..session import Session, Stored

PURPOSE = "heliograph.ray.tune"
BY = "tune"
STOPPED = "Tune stops or pauses this trial"


class Reports:
    """What a trial tells Tune.

    Args:
        metric: what the search goes by. Tune refuses a report without it, so it is NaN until it is measured.

    Attributes:
        stop: Tune's word that the trial is to end; nothing is told after it.
    """

    def __init__(self, metric: str) -> None:
        self._tune = require("ray.tune", PURPOSE, extra="ray")
        self._metric = metric
        self._names: set[str] = set()
        self.stop: Notice | None = None

    def tell(self, metrics: dict[str, float], checkpoint: Any) -> Notice | None:
        """Report, and wait for what Tune says.

        Args:
            metrics: what was measured.
            checkpoint: one of Tune's, or None.

        Returns:
            Whether the trial is to end.

        Raises:
            OSError: the storage did not take the checkpoint.
        """
        if self.stop is None:
            self._names |= metrics.keys()
            try:
                self._tune.report({self._metric: math.nan, **metrics}, checkpoint=checkpoint)
            except SystemExit:  # how Tune ends a function, also to go on with it elsewhere; it does not say why
                self.stop = Notice(BY, STOPPED)
        return self.stop

    def check_measured(self) -> None:
        """Raise ValueError where nothing was ever reported of what the search goes by."""
        if self.stop is None and self._metric not in self._names:
            raise ValueError(
                f"This trial ended, and never measured metric={self._metric!r}.{known_names(self._metric, self._names)}"
            )


@contextmanager
def until_stopped(session: Session) -> Iterator[None]:
    """Be done where the function is left since Tune has stopped a training in it, and another one was to follow."""
    try:
        yield
    except SystemExit:
        if session.left is None or session.left.by != BY:
            raise


class TrialSession:
    """The line from a run in a trial's own process to Tune.

    Args:
        reports: the way to Tune.
        begun: what the trial goes on from, the newest first.

    Attributes:
        is_restart: whether Tune has this trial go on from a checkpoint: its own, or that of a better one.
        left: the notice upon which a run here ended.
    """

    def __init__(self, reports: Reports, begun: Sequence[Stored]) -> None:
        self._tune = require("ray.tune", PURPOSE, extra="ray")
        self._reports, self._begun = reports, begun
        self.is_restart = bool(begun)
        self.left: Notice | None = None

    def report(self, metrics: dict[str, float], folder: Path | None) -> Notice | None:
        """Report to Tune, which copies the folder into the storage, and wait for what it says."""
        checkpoint = None if folder is None else self._tune.Checkpoint.from_directory(folder)
        return self._reports.tell(metrics, checkpoint)

    def stored(self) -> Sequence[Stored]:
        """Return what Tune has this trial go on from, newest first."""
        return self._begun

    def notice(self) -> Notice | None:
        """Return None: Tune does not tell a trial that its machine is to be taken away."""
        return None

    def leave(self, notice: Notice) -> None:
        """Remember that a run ended upon a notice."""
        self.left = notice

    def pulse(self, run: str, progress: Progress) -> None:
        """Take no note of where the run is: nobody asks for it."""

    def resumed(self, run: str, progress: Progress, path: Path | None) -> None:
        """Take no note of where the run goes on: its result tells."""


class TrialHost:
    """The search's representative in a process that trains.

    Args:
        session: the line to what runs this process.

    Attributes:
        result: how the last training ended, where it ended without an error.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.result: RunResult | None = None

    def prepare(self, plugins: Plugins) -> None:
        """Have every training report to Tune, and heed what Tune has changed.

        Raises:
            SystemExit: an earlier training of the function was told to leave, so none is to follow.
        """
        if self.session.left is not None:
            raise SystemExit(self.session.left.reason)
        claimed = {word for plugin in plugins for word in getattr(plugin, "exclusive", ())}
        if "ray_report" not in claimed:
            plugins.load("ray_report")
        if "tune" not in claimed:
            plugins.register(Tune())

    def ended(self, result: RunResult) -> None:
        """Take note of how a training ended."""
        self.result = result
