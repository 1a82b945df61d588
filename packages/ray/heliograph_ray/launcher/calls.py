"""What a launcher was asked for, and a call on its workers."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from heliograph.core.distributed.queue import child_queue
from heliograph.spi import describe_error, require

from ..cluster import connect
from ..storage.checkpoints import check_storage_path, repair_record
from .attempts import GroupTracker, RayValues, summarize_attempts
from .driver_loop import DriverLoop, OnMessage, OnReport
from .fit import Fit
from .job import RayJob
from .mailbox import Call, DriverChannel
from .sizes import Sizes

logger = logging.getLogger("heliograph")

Start = Callable[[Call], Fit]


@dataclass(frozen=True)
class Setup:
    """The arguments of a launcher, checked.

    Attributes:
        address: of the cluster; None for any, or one that is started.
        variables: the environment variables that Ray Train reads when it starts a run.
        sizes: the allowed numbers of workers.
        scaling: makes the configuration of so many workers for Ray Train.
        run_config: makes the configuration of a run with this name for Ray Train.
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
        """Return the connection to the cluster, as a context."""
        needed = {name: amount * self.sizes.least for name, amount in self.sizes.resources.items()}
        return connect(self.address, needed=needed, cpus=math.ceil(needed.get("CPU", 0)))

    def new_run_config(self) -> Any:
        """Return the configuration of a run; its name is a new one unless the launcher has one.

        Raises:
            OSError: the storage cannot be reached, created or written to.
            ValueError: it is not a storage.
        """
        made = self.run_config(name=self.name or f"heliograph-{uuid4().hex[:12]}")
        check_storage_path(made.storage_path)
        return made

    def trainer(self, function: Callable[[], object], run_config: Any) -> Any:
        """Return Ray's trainer, whose workers call a function."""
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
        """Run a call until it completes.

        Args:
            channel: connects this process with the workers.
            payload: the function and its arguments, pickled.
            run_config: names the storage.
            start: starts workers for an attempt of the call, or gives it to those that wait.
            on_message: called with (rank, object) for what is put into the ranks' queues; None keeps it.
            on_report: called with each report; returns (name, reason) to stop the runs, or None.
            keeps: whether the workers wait for another call after it.

        Raises:
            BaseException: what a worker raised.
        """
        messages: list[tuple[int, Any]] = []
        on_message = on_message or (lambda *message: messages.append(message))
        tracker = GroupTracker()
        call = partial(
            Call,
            uuid4().hex,
            mailbox=channel.mailbox,
            payload=payload,
            grace=self.grace,
            has_own_storage=self.name is None,
        )
        job = RayJob(
            DriverLoop(channel, tracker, self.grace, on_message, on_report, keeps=keeps),
            tracker,
            self.sizes,
            lambda fit: start(call(fit=fit)),
            max_failures=self.max_failures,
            backoff=self.backoff,
        )
        group = job.run()
        values = [_value(rank, group.values[rank]) for rank in range(group.world_size)]
        results = [pickle.loads(each) for each in group.results]  # noqa: S301  # from our own workers
        storage = f"{run_config.storage_path}/{run_config.name}"
        return RayValues(values, messages, results, summarize_attempts(tracker.groups), storage)


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], on_message: Any) -> bytes:
    """Return a function and its arguments as bytes, after a check of the arguments of `run`.

    Raises:
        RuntimeError: this process is itself a rank.
        TypeError: an argument is of the wrong type, or cannot be pickled.
    """
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
