"""A call on the workers of a launcher, and its attempts."""

from __future__ import annotations

import logging
import math
import pickle
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Never
from uuid import uuid4

from heliograph.core.distributed.failure import ProcessFailure
from heliograph.core.distributed.launcher import child_queue
from heliograph.spi import describe_error, require

from ..cluster import connect
from ..storage import check_storage_path, repair_record
from .attempts import GroupTracker, RayValues, WorkerGroup, summarize_attempts
from .capacity import Sizes, explain_start_timeout
from .driver_loop import DriverLoop, Fit, OnMessage, OnReport
from .failures import AttemptFailure, classify_failure
from .mailbox import DriverChannel, WorkerCall

MAX_DELAY = 60.0  # seconds from one attempt to the next

logger = logging.getLogger("heliograph")

Start = Callable[[WorkerCall], Fit]


class RayJob:
    """Runs a call on workers, with retries.

    Args:
        setup: the arguments of the launcher.
        loop: processes the workers' messages.
        tracker: records them.
        start: starts the workers of the attempt with the given id.
    """

    def __init__(self, setup: Setup, loop: DriverLoop, tracker: GroupTracker, start: Callable[[str], Fit]) -> None:
        self._setup, self._loop, self._tracker, self._start = setup, loop, tracker, start
        self._failures = 0
        self._failures_in_a_row = 0  # without progress in between
        self._batches_done = 0

    def run(self) -> WorkerGroup:
        with self._loop.handle_signals():
            group = self._run_attempt()
            while group is None:
                group = self._run_attempt()
        self._raise_driver_error()
        return group

    def _run_attempt(self) -> WorkerGroup | None:
        fit = self._start(self._tracker.start_fit())
        error = self._loop.run_fit(fit, self._setup.sizes)
        group, is_stopping = self._tracker.group, self._loop.is_stopping
        if group is not None and group.is_complete and (is_stopping or not group.exit_notices):
            if error is not None:
                logger.warning("all ranks had returned when Ray's run failed: %s", error)
            self._tracker.end_fit("completed")
            return group
        failure = classify_failure(group, explain_start_timeout(error, self._setup.sizes), is_stopping=is_stopping)
        self._tracker.end_fit(failure.kind, failure.text)
        self._raise_driver_error(failure)
        if fit.is_reused and failure.kind in ("lost", "hung") and not (group is not None and group.has_started):
            logger.warning("the kept workers are gone; starting new ones: %s", failure.text)
            return None
        self._loop.pause(self._delay(failure))
        self._raise_driver_error()
        return None

    def _delay(self, failure: AttemptFailure) -> float:
        number = len(self._tracker.groups)
        if failure.kind == "preempted":
            logger.warning("attempt %d was preempted; retrying: %s", number, failure.text)
            return 0.0
        if failure.kind == "failed":
            _raise(failure)
        self._failures += 1
        if self._failures > self._setup.max_failures >= 0:
            _raise(failure, f"heliograph: attempt {number} was the last: max_failures={self._setup.max_failures}")
        batches_done = max(group.batches_done for group in self._tracker.groups)
        self._failures_in_a_row = 1 if batches_done > self._batches_done else self._failures_in_a_row + 1
        self._batches_done = batches_done
        delay = float(min(MAX_DELAY, self._setup.backoff * 2 ** (self._failures_in_a_row - 1)))
        outcome = "hung" if failure.kind == "hung" else "was lost"
        logger.warning("attempt %d %s; retrying in %g s: %s", number, outcome, delay, failure.text)
        return delay

    def _raise_driver_error(self, failure: AttemptFailure | None = None) -> None:
        error: BaseException | None = self._loop.error
        for signum in self._loop.signals:
            error = error or (KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum))
        if error is not None:
            if failure is not None and any(failed.text for failed in failure.errors[:1]):  # raised by a worker
                error.add_note(f"heliograph: meanwhile, {failure.text}")
            raise error


def _raise(failure: AttemptFailure, note: str = "") -> Never:
    first = failure.errors[0]
    if note:
        first.error.add_note(note)
    if not first.text and first.error is not failure.cause:  # not an error of a worker, which has its own cause
        first.error.__cause__ = failure.cause
    ProcessFailure.raise_first(list(failure.errors), [], 0.0, set())
    raise AssertionError("an attempt that failed has an error")


@dataclass(frozen=True)
class Setup:
    """The validated arguments of a launcher.

    Attributes:
        address: the address of the cluster; None for any, or a new local one.
        variables: the environment variables that Ray Train reads when it starts a run.
        sizes: the allowed numbers of workers.
        scaling: makes Ray Train's `ScalingConfig` for a number of workers.
        run_config: makes Ray Train's `RunConfig` for a name.
        name: the name of the run in the storage; None for a new one.
        max_failures: how many times lost or hung workers are replaced; -1 for any number.
        backoff: seconds before the second attempt.
        grace: seconds that the other workers have to end after one has failed.
    """

    address: str | None
    variables: Mapping[str, str]
    sizes: Sizes
    scaling: Callable[..., Any]
    run_config: Callable[..., Any]
    name: str | None
    max_failures: int
    backoff: float
    grace: float

    def connect(self) -> AbstractContextManager[None]:
        needed = {name: amount * self.sizes.least for name, amount in self.sizes.resources.items()}
        return connect(self.address, needed=needed, cpus=math.ceil(needed.get("CPU", 0)))

    def new_run_config(self) -> Any:
        made = self.run_config(name=self.name or f"heliograph-{uuid4().hex[:12]}")
        check_storage_path(made.storage_path)
        return made

    def trainer(self, function: Callable[[], object], run_config: Any) -> Any:
        train = require("ray.train.torch", "RayLauncher", extra="ray")
        if warning := repair_record(run_config.storage_path, run_config.name):
            logger.warning(warning)
        scaling = self.scaling(num_workers=self.sizes.asked)
        return train.TorchTrainer(function, scaling_config=scaling, run_config=run_config)

    def run(
        self,
        channel: DriverChannel,
        payload: bytes,
        run_config: Any,
        start: Start,
        on_message: OnMessage | None,
        *,
        on_report: OnReport | None = None,
        keeps: bool = False,
    ) -> RayValues:
        messages: list[tuple[int, Any]] = []
        on_message = on_message or (lambda *message: messages.append(message))
        tracker = GroupTracker()
        loop = DriverLoop(channel, tracker, self.grace, on_message, on_report, keeps=keeps)
        call = WorkerCall(uuid4().hex, "", channel.mailbox, payload, self.grace, has_own_storage=self.name is None)
        group = RayJob(self, loop, tracker, lambda fit: start(replace(call, fit=fit))).run()
        values = [_value(rank, group.values[rank]) for rank in range(group.world_size)]
        results = [pickle.loads(result) for result in group.results]  # noqa: S301  # from our own workers
        storage = f"{run_config.storage_path}/{run_config.name}"
        return RayValues(values, messages, results, summarize_attempts(tracker.groups), storage)


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], on_message: Any) -> bytes:
    if child_queue() is not None:
        raise RuntimeError(
            "RayLauncher.run was called in a rank that RayLauncher or launch has started. Call it in the script, once; "
            "in a rank, call the function itself."
        )
    if on_message is not None and not callable(on_message):
        raise TypeError(f"on_message takes a function of a rank and an object, or None; got {on_message!r}.")
    cloudpickle = require("ray.cloudpickle", "RayLauncher", extra="ray")
    if not callable(fn):
        raise TypeError(f"RayLauncher.run takes a function and its arguments, got {fn!r} as the function.")
    try:
        pickled: bytes = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"RayLauncher.run cannot send {fn!r} and its arguments to the workers: {describe_error(error)}. It "
            f"takes a function and arguments that can be pickled."
        ) from error
    return pickled


def _value(rank: int, pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)  # noqa: S301  # from our own worker
    except Exception as error:
        raise TypeError(
            f"The value of rank {rank} cannot be loaded in this process: {error}. Return plain data."
        ) from error
