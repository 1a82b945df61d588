"""A trial on several workers: a launcher in the trial's process, whose main worker waits for Tune's answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph import Progress
from heliograph.spi import current_host, hosted_by, require

from ..launcher.launcher import RayLauncher
from ..session import Notice, Session, StoredReport, current_session
from .trial_session import PURPOSE, TrialHost, TuneReporter, ignore_stop

if TYPE_CHECKING:
    from heliograph import RunResult
    from heliograph.spi import Host

    from ..launcher.mailbox import Reported
    from .location import Location

Function = Callable[[dict[str, Any]], object]


class ReportAnswers:
    """An actor that keeps Tune's answer to each report."""

    def __init__(self) -> None:
        self._answers: list[Notice | None] = []
        self._added = asyncio.Condition()

    async def add(self, answer: Notice | None) -> None:
        async with self._added:
            self._answers.append(answer)
            self._added.notify_all()

    async def count(self) -> int:
        return len(self._answers)

    async def wait_for(self, number: int) -> Notice | None:
        async with self._added:
            await self._added.wait_for(lambda: len(self._answers) > number)
        return self._answers[number]


def run_on_workers(
    fn: Function,
    config: dict[str, Any],
    options: Mapping[str, Any],
    reporter: TuneReporter,
    resumable: Sequence[StoredReport],
    location: Location,
) -> RunResult | None:
    checkpoint_of = require("ray.tune", PURPOSE, extra="ray").Checkpoint
    answers = require("ray", PURPOSE, extra="ray").remote(num_cpus=0)(ReportAnswers).remote()
    filesystem, _ = location.open_storage()

    def forward(reported: Reported) -> tuple[str, str] | None:
        checkpoint = None if reported.path is None else checkpoint_of(reported.path, filesystem)
        stop = reporter.report(reported.metrics, checkpoint)
        answers.add.remote(stop)
        return None if stop is None else (stop.by, stop.reason)

    launcher = RayLauncher(**options, storage_path=location.path, keep=1)  # Tune has a copy of its own
    launcher._on_report = forward
    return launcher.run(run_function, fn, config, answers, resumable).result


def run_function(fn: Function, config: dict[str, Any], answers: Any, resumable: Sequence[StoredReport]) -> None:
    launcher_host, launcher_session = current_host(), current_session()
    assert launcher_host is not None
    assert launcher_session is not None
    host = WorkerHost(WorkerSession(launcher_session, answers, resumable), launcher_host)
    with hosted_by(host), ignore_stop(host.session):
        fn(config)


class WorkerHost(TrialHost):
    def __init__(self, session: Session, launcher: Host) -> None:
        super().__init__(session)
        self._launcher = launcher

    def ended(self, result: RunResult) -> None:
        self._launcher.ended(result)


class WorkerSession:
    """Connects a run on a worker of a trial with the launcher, and through it with Tune.

    Args:
        launcher: the launcher's session.
        answers: the handle of `ReportAnswers`.
        resumable: the reports that the trial may resume, newest first.
    """

    def __init__(self, launcher: Session, answers: Any, resumable: Sequence[StoredReport]) -> None:
        self._ray = require("ray", PURPOSE, extra="ray")
        self._is_main = require("ray.train", PURPOSE, extra="ray").get_context().get_world_rank() == 0
        self._launcher, self._answers, self._resumable = launcher, answers, resumable
        self._reported: int = self._ray.get(answers.count.remote()) if self._is_main else 0
        self.is_restart = launcher.is_restart or bool(resumable)
        self.exit_notice: Notice | None = None

    def report(self, metrics: dict[str, float], folder: Path | None) -> Notice | None:
        stop = self._launcher.report(metrics, folder)
        if not self._is_main:
            return stop
        answer: Notice | None = self._ray.get(self._answers.wait_for.remote(self._reported))
        self._reported += 1
        return answer or stop

    def stored_reports(self) -> Sequence[StoredReport]:
        return [*self._launcher.stored_reports(), *self._resumable]

    def notice(self) -> Notice | None:
        return self._launcher.notice()

    def record_exit(self, notice: Notice) -> None:
        self.exit_notice = notice
        self._launcher.record_exit(notice)

    def update_progress(self, run: str, progress: Progress) -> None:
        self._launcher.update_progress(run, progress)

    def record_start(self, run: str, progress: Progress, path: Path | None) -> None:
        self._launcher.record_start(run, progress, path)
