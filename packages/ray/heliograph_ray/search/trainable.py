"""A function as a Tune trial, in the trial's process or on its own workers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heliograph.core.distributed.exceptions import Carried
from heliograph.spi import hosted_by, require

from .location import Location, find_resumable, summarize_end
from .trial_session import PURPOSE, TrialHost, TrialSession, TuneReporter, ignore_stop
from .trial_workers import run_on_workers

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
    _enter_folder()
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


# A trial must resume from the storage only, not from files of a previous process.
def _enter_folder() -> None:
    number = 1
    while (folder := Path(f"run_{number}")).exists():
        number += 1
    folder.mkdir()
    os.chdir(folder)


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
