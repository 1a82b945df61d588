"""The session of a trial, which reports to Tune; Tune answers whether to stop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph import Progress
from heliograph.spi import known_names, require

from ..session import Notice
from .pbt import Tune

if TYPE_CHECKING:
    from heliograph import Plugins, RunResult

    from ..session import Session, StoredReport

PURPOSE = "heliograph_ray.tune"
BY = "tune"
STOPPED = "Tune stops or pauses this trial"


class TuneReporter:
    """Reports to Tune.

    Args:
        metric: the metric that the search optimizes. Tune rejects a report without it, so it is NaN until measured.

    Attributes:
        stop: Tune's request to end the trial; after it nothing is reported.
    """

    def __init__(self, metric: str) -> None:
        self._tune = require("ray.tune", PURPOSE, extra="ray")
        self._metric = metric
        self._names: set[str] = set()
        self.stop: Notice | None = None

    def report(self, metrics: dict[str, float], checkpoint: Any) -> Notice | None:
        if self.stop is None:
            self._names |= metrics.keys()
            try:
                self._tune.report({self._metric: math.nan, **metrics}, checkpoint=checkpoint)
            except SystemExit:  # Tune ends a function this way, also to continue it elsewhere
                self.stop = Notice(BY, STOPPED)
        return self.stop

    def check_measured(self) -> None:
        if self.stop is None and self._metric not in self._names:
            raise ValueError(
                f"This trial never measured metric={self._metric!r}.{known_names(self._metric, self._names)}"
            )


@contextmanager
def ignore_stop(session: Session) -> Iterator[None]:
    """Suppress the SystemExit of a training that did not start because Tune stopped the previous one."""
    try:
        yield
    except SystemExit:
        if session.exit_notice is None or session.exit_notice.by != BY:
            raise


class TrialSession:
    """Connects a run in a trial's own process with Tune.

    Args:
        reporter: reports to Tune.
        resumable: the reports that the trial may resume, newest first.

    Attributes:
        is_restart: whether the trial resumes a checkpoint, its own or the one of a better trial.
        exit_notice: the notice that ended a run of this process.
    """

    def __init__(self, reporter: TuneReporter, resumable: Sequence[StoredReport]) -> None:
        self._tune = require("ray.tune", PURPOSE, extra="ray")
        self._reporter, self._resumable = reporter, resumable
        self.is_restart = bool(resumable)
        self.exit_notice: Notice | None = None

    def report(self, metrics: dict[str, float], folder: Path | None) -> Notice | None:
        checkpoint = None if folder is None else self._tune.Checkpoint.from_directory(folder)
        return self._reporter.report(metrics, checkpoint)

    def stored_reports(self) -> Sequence[StoredReport]:
        return self._resumable

    def notice(self) -> Notice | None:
        return None

    def record_exit(self, notice: Notice) -> None:
        self.exit_notice = notice

    def update_progress(self, run: str, progress: Progress) -> None: ...

    def record_start(self, run: str, progress: Progress, path: Path | None) -> None: ...


class TrialHost:
    """The host of the trainings in a trial; see `heliograph.core.host.Host`.

    Attributes:
        result: the result of the last training that ended without an error.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.result: RunResult | None = None

    def prepare(self, plugins: Plugins) -> None:
        if self.session.exit_notice is not None:
            raise SystemExit(self.session.exit_notice.reason)
        claimed = {word for plugin in plugins for word in getattr(plugin, "exclusive", ())}
        if "ray_report" not in claimed:
            plugins.load("ray_report")
        if "tune" not in claimed:
            plugins.register(Tune())

    def ended(self, result: RunResult) -> None:
        self.result = result
