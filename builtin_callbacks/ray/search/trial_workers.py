"""A trial on several workers: a launcher within the trial, whose main worker waits for what Tune says of a report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....core.host import current_host, hosted_by
from ....core.system.extras import require
from ....events import Progress
from ..launcher.launcher import RayLauncher
from ..session import Notice, Session, Stored, current_session
from .trial_session import PURPOSE, Reports, TrialHost, until_stopped

if TYPE_CHECKING:
    from ....core.host import Host
    from ....core.result import RunResult
    from ..launcher.mailbox import Reported
    from .places import Place

Function = Callable[[dict[str, Any]], object]


class Answers:
    """An actor that keeps what Tune says of each report."""

    def __init__(self) -> None:
        self._given: list[Notice | None] = []
        self._came = asyncio.Condition()

    async def give(self, answer: Notice | None) -> None:
        """Answer the next report."""
        async with self._came:
            self._given.append(answer)
            self._came.notify_all()

    async def count(self) -> int:
        """Return how many there are, of workers that are no more."""
        return len(self._given)

    async def take(self, number: int) -> Notice | None:
        """Return an answer, the first is 0, as soon as it is there."""
        async with self._came:
            await self._came.wait_for(lambda: len(self._given) > number)
        return self._given[number]


def on_workers(
    fn: Function,
    config: dict[str, Any],
    options: Mapping[str, Any],
    reports: Reports,
    begun: Sequence[Stored],
    place: Place,
) -> RunResult | None:
    """Run a trial on workers of its own; return how the last training ended.

    Args:
        fn: called with the hyper-parameters on each worker.
        config: the hyper-parameters.
        options: arguments for the launcher.
        reports: the way to Tune.
        begun: what the trial goes on from, the newest first.
        place: of the trial in the storage.
    """
    checkpoint_of = require("ray.tune", PURPOSE, extra="ray").Checkpoint
    answers = require("ray", PURPOSE, extra="ray").remote(num_cpus=0)(Answers).remote()
    filesystem, _ = place.opened()

    def pass_on(reported: Reported) -> tuple[str, str] | None:
        checkpoint = None if reported.path is None else checkpoint_of(reported.path, filesystem)
        stop = reports.tell(reported.metrics, checkpoint)
        answers.give.remote(stop)
        return None if stop is None else (stop.by, stop.reason)

    launcher = RayLauncher(**options, storage_path=place.path, keep=1)  # Tune has a copy of its own
    launcher._on_report = pass_on
    return launcher.run(work, fn, config, answers, begun).result


def work(fn: Function, config: dict[str, Any], answers: Any, begun: Sequence[Stored]) -> None:
    """Run a trial's function on one of its workers."""
    host, session = current_host(), current_session()
    assert host is not None
    assert session is not None
    member = MemberHost(MemberSession(session, answers, begun), host)
    with hosted_by(member), until_stopped(member.session):
        fn(config)


class MemberHost(TrialHost):
    """The search's representative on a worker of a trial.

    Args:
        session: the line to what runs this worker.
        launcher: the launcher's representative.
    """

    def __init__(self, session: Session, launcher: Host) -> None:
        super().__init__(session)
        self._launcher = launcher

    def ended(self, result: RunResult) -> None:
        """Let the launcher take note of how a training ended."""
        self._launcher.ended(result)


class MemberSession:
    """The line from a run on a worker of a trial to the launcher, and through that to Tune.

    Args:
        launcher: the line to the launcher.
        answers: what Tune says of reports, an actor.
        begun: what Tune has the trial go on from, newest first.

    Attributes:
        is_restart: whether the trial goes on, or its workers were started anew.
        left: the notice upon which a run here ended.
    """

    def __init__(self, launcher: Session, answers: Any, begun: Sequence[Stored]) -> None:
        self._ray = require("ray", PURPOSE, extra="ray")
        self._is_main = require("ray.train", PURPOSE, extra="ray").get_context().get_world_rank() == 0
        self._launcher, self._answers, self._begun = launcher, answers, begun
        self._reported: int = self._ray.get(answers.count.remote()) if self._is_main else 0
        self.is_restart = launcher.is_restart or bool(begun)
        self.left: Notice | None = None

    def report(self, metrics: dict[str, float], folder: Path | None) -> Notice | None:
        """Report by way of the launcher; the main rank waits for what Tune says."""
        asked = self._launcher.report(metrics, folder)
        if not self._is_main:
            return asked
        answer: Notice | None = self._ray.get(self._answers.take.remote(self._reported))
        self._reported += 1
        return answer or asked

    def stored(self) -> Sequence[Stored]:
        """Return what these workers or their predecessors have reported, then what Tune has the trial go on from."""
        return [*self._launcher.stored(), *self._begun]

    def notice(self) -> Notice | None:
        """Return whether a machine of this run is to be taken away."""
        return self._launcher.notice()

    def leave(self, notice: Notice) -> None:
        """Remember that a run ended upon a notice."""
        self.left = notice
        self._launcher.leave(notice)

    def pulse(self, run: str, progress: Progress) -> None:
        """Tell where the run is."""
        self._launcher.pulse(run, progress)

    def resumed(self, run: str, progress: Progress, path: Path | None) -> None:
        """Tell where a training begins."""
        self._launcher.resumed(run, progress, path)
