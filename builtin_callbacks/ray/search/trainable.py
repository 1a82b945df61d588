"""A function as one of Tune's trials: a run in the trial's process, or on workers of its own, which closes properly."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....core.distributed.launch.exceptions import Carried, carry
from ....core.host import hosted_by
from ....core.result import RunResult
from ....core.system.extras import require
from ..session import Stored
from .places import Place, ending
from .trial_session import PURPOSE, Reports, TrialHost, TrialSession, until_stopped
from .trial_storage import begun_from
from .trial_workers import on_workers

CLOSING = 600.0  # seconds that the last runs have to close; Ray gives the others as many


class TrialFailed(RuntimeError):  # noqa: N818  # carries the user's own error, which is raised or shown
    """The function raised in a trial."""

    def __init__(self, error: Carried) -> None:
        super().__init__(error)  # as given, so that it can be pickled
        self.error = error

    def __str__(self) -> str:
        return self.error.text


@dataclass(frozen=True)
class Plan:
    """What a trial does.

    Attributes:
        fn: called with the hyper-parameters.
        metric: what the search goes by.
        place: of the search.
        workers: arguments for a launcher; None for a run in the trial's own process.
        resources: what Ray sets aside for the trial's own process, by name.
    """

    fn: Callable[[dict[str, Any]], object]
    metric: str
    place: Place
    workers: Mapping[str, Any] | None = None
    resources: Mapping[str, float] = field(default_factory=dict)


def trainable(plan: Plan) -> Any:
    """Return one of Tune's trainables: a class."""
    module = require("ray.tune.trainable", PURPOSE, extra="ray")
    ray_tune = require("ray.tune", PURPOSE, extra="ray")
    name = getattr(plan.fn, "__name__", type(plan.fn).__name__)

    def train(config: dict[str, Any]) -> None:
        run_trial(plan, config)

    base: Any = module.wrap_function(train, name=name)

    class Trial(base):  # type: ignore[misc]
        """A trial that ends when its run has closed, whatever ends it."""

        _thread: threading.Thread | None = None
        _has_left = False

        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> Any:  # noqa: ARG003  # as Tune calls it
            return ray_tune.PlacementGroupFactory([dict(plan.resources)])

        def _trainable_func(self, config: dict[str, Any]) -> Any:
            self._thread = threading.current_thread()
            return super()._trainable_func(config)

        def cleanup(self) -> None:
            """Have the run stop, and wait until it has closed; Tune asks for this once, the search before."""
            if not self._has_left:
                self._has_left = True
                super().cleanup()
                if self._thread is not None:
                    self._thread.join()

    Trial.__name__ = Trial.__qualname__ = name
    return Trial


def run_trial(plan: Plan, config: dict[str, Any]) -> None:
    """Run a trial, in the thread that Tune has started for it.

    Raises:
        TrialFailed: the function raised.
        SystemExit: Tune ends the trial.
    """
    ray_tune = require("ray.tune", PURPOSE, extra="ray")
    place = plan.place.within(Path(ray_tune.get_context().get_trial_dir()).name)
    begun = begun_from(ray_tune.get_checkpoint(), place)
    _enter_folder()
    reports, result, error = Reports(plan.metric), None, None
    try:
        if plan.workers is None:
            result = _alone(plan, config, reports, begun)
        else:
            result = on_workers(plan.fn, config, plan.workers, reports, begun, place)
        if not begun:  # one that goes on may have nothing left to do
            reports.check_measured()
    except BaseException as raised:  # noqa: BLE001  # shown or raised where the search was started
        error = raised
        raise TrialFailed(carry(raised)) from None
    finally:
        place.write(ending(result, error))
    if reports.stop is not None:
        raise SystemExit(0)  # Tune's own, taken up again: it waits for no more reports


def _alone(plan: Plan, config: dict[str, Any], reports: Reports, begun: Sequence[Stored]) -> RunResult | None:
    host = TrialHost(TrialSession(reports, begun))
    with hosted_by(host), until_stopped(host.session):
        plan.fn(config)
    return host.result


def _enter_folder() -> None:
    """Work in an empty folder: what the trial goes on from comes from the storage, not from what lies about here."""
    number = 1
    while (folder := Path(f"run_{number}")).exists():
        number += 1
    folder.mkdir()
    os.chdir(folder)


def closing() -> Any:
    """Return one of Tune's callbacks: the search ends when all runs have closed, for which Tune waits some seconds."""
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
            if self._closed and all(each.is_finished() for each in trials):
                closed, self._closed = self._closed, []
                ray.wait(closed, num_returns=len(closed), timeout=CLOSING)

        def __getstate__(self) -> dict[str, Any]:
            return {"_closed": []}  # Tune keeps this object in the storage

    return Closing()
