"""A trial of a search: the user's function in the trial's process or on its own workers, which reports to Tune."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from heliograph import Plugins, Progress, RunResult
from heliograph.core.distributed.failure import Carried
from heliograph.spi import Host, current_host, hosted_by, known_names, require

from ..launcher.launcher import RayLauncher
from ..launcher.mailbox import Reported
from ..launcher.worker import TrainSession
from ..session import Notice, Session, current_session
from ..storage import StoredFolder
from .location import Location, find_resumable, summarize_end
from .pbt import Tune

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

    def __init__(self, reporter: TuneReporter, resumable: Sequence[StoredFolder]) -> None:
        self._tune = require("ray.tune", PURPOSE, extra="ray")
        self._reporter, self._resumable = reporter, resumable
        self.is_restart = bool(resumable)
        self.exit_notice: Notice | None = None

    def report(self, metrics: dict[str, float], folder: Path | None) -> Notice | None:
        checkpoint = None if folder is None else self._tune.Checkpoint.from_directory(folder)
        return self._reporter.report(metrics, checkpoint)

    def stored_reports(self) -> Sequence[StoredFolder]:
        return self._resumable

    def notice(self) -> Notice | None:
        return None

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


Function = Callable[[dict[str, Any]], object]


def run_on_workers(
    fn: Function,
    config: dict[str, Any],
    options: Mapping[str, Any],
    reporter: TuneReporter,
    resumable: Sequence[StoredFolder],
    location: Location,
) -> RunResult | None:
    checkpoint_of = require("ray.tune", PURPOSE, extra="ray").Checkpoint
    answers = require("ray.util.queue", PURPOSE, extra="ray").Queue(actor_options={"num_cpus": 0})
    filesystem, _ = location.open_storage()

    def forward(reported: Reported) -> tuple[str, str] | None:
        checkpoint = None if reported.path is None else checkpoint_of(reported.path, filesystem)
        stop = reporter.report(reported.metrics, checkpoint)
        answers.put(stop)
        return None if stop is None else (stop.by, stop.reason)

    launcher = RayLauncher(**options, storage_path=location.path, keep=1)  # Tune has a copy of its own
    launcher._on_report = forward
    return launcher.run(run_function, fn, config, answers, resumable).result


def run_function(fn: Function, config: dict[str, Any], answers: Any, resumable: Sequence[StoredFolder]) -> None:
    launcher, session = current_host(), current_session()
    assert launcher is not None
    assert isinstance(session, TrainSession)
    session.join_search(answers, resumable)
    with hosted_by(WorkerHost(session, launcher)), ignore_stop(session):
        fn(config)


class WorkerHost(TrialHost):
    def __init__(self, session: Session, launcher: Host) -> None:
        super().__init__(session)
        self._launcher = launcher

    def ended(self, result: RunResult) -> None:
        self._launcher.ended(result)


CLOSE_TIMEOUT = 600.0  # seconds that the last runs have to close; Ray gives the others the same


class TrialFailed(RuntimeError):  # noqa: N818  # carries the user's own error, which is raised or logged
    """The function raised in a trial."""

    def __init__(self, error: Carried) -> None:
        super().__init__(error)  # as given, so that it can be pickled
        self.error = error

    def __str__(self) -> str:
        return self.error.text


@dataclass(frozen=True)
class Plan:
    """The task of each trial of a search.

    Attributes:
        fn: called with the hyper-parameters.
        metric: the metric that the search optimizes.
        location: the folder of the search.
        workers: the arguments of a launcher; None to run in the trial's own process.
        resources: the resources that Ray reserves for the trial's own process, by name.
    """

    fn: Callable[[dict[str, Any]], object]
    metric: str
    location: Location
    workers: Mapping[str, Any] | None = None
    resources: Mapping[str, float] = field(default_factory=dict)


def trainable(plan: Plan) -> Any:
    module = require("ray.tune.trainable", PURPOSE, extra="ray")
    ray_tune = require("ray.tune", PURPOSE, extra="ray")
    name = getattr(plan.fn, "__name__", type(plan.fn).__name__)

    def train(config: dict[str, Any]) -> None:
        run_trial(plan, config)

    base: Any = module.wrap_function(train, name=name)

    class ClosingTrial(base):  # type: ignore[misc]
        """A trial that always waits until its run has closed."""

        _thread: threading.Thread | None = None
        _is_cleaned_up = False

        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> Any:  # noqa: ARG003  # as Tune calls it
            return ray_tune.PlacementGroupFactory([dict(plan.resources)])

        def _trainable_func(self, config: dict[str, Any]) -> Any:
            self._thread = threading.current_thread()
            return super()._trainable_func(config)

        def cleanup(self) -> None:
            if not self._is_cleaned_up:
                self._is_cleaned_up = True
                super().cleanup()
                if self._thread is not None:
                    self._thread.join()

    ClosingTrial.__name__ = ClosingTrial.__qualname__ = name
    return ClosingTrial


def run_trial(plan: Plan, config: dict[str, Any]) -> None:
    ray_tune = require("ray.tune", PURPOSE, extra="ray")
    location = plan.location.subfolder(Path(ray_tune.get_context().get_trial_dir()).name)
    resumable = find_resumable(ray_tune.get_checkpoint(), location)
    os.chdir(mkdtemp(prefix="run_", dir="."))  # the trial must resume from the storage, not from files of a process
    reporter, result, error = TuneReporter(plan.metric), None, None
    try:
        if plan.workers is None:
            host = TrialHost(TrialSession(reporter, resumable))
            with hosted_by(host), ignore_stop(host.session):
                plan.fn(config)
            result = host.result
        else:
            result = run_on_workers(plan.fn, config, plan.workers, reporter, resumable, location)
        if not resumable:  # a trial that resumes may have nothing left to do
            reporter.check_measured()
    except BaseException as raised:  # noqa: BLE001  # logged or raised in the process of the search
        error = raised
        raise TrialFailed(Carried.of(raised)) from None
    finally:
        location.write(summarize_end(result, error))
    if reporter.stop is not None:
        raise SystemExit(0)  # the exit that the reporter caught: Tune expects no more reports


def close_callback() -> Any:
    base: Any = require("ray.tune", PURPOSE, extra="ray").Callback
    ray = require("ray", PURPOSE, extra="ray")

    class Closing(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self._closed: list[Any] = []

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            actor = trial.temporary_state.ray_actor
            if actor is not None:
                self._closed.append(actor.cleanup.remote())

        def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
            if self._closed and all(trial.is_finished() for trial in trials):
                closed, self._closed = self._closed, []
                ray.wait(closed, num_returns=len(closed), timeout=CLOSE_TIMEOUT)

        def __getstate__(self) -> dict[str, Any]:
            return {"_closed": []}  # Tune pickles this object into the storage

    return Closing()
