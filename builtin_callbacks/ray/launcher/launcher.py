"""Start workers on a Ray cluster that train together, as `launch` does on one machine."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from ....core.distributed.launch.processes import environment
from ....core.distributed.launch.queue import child_queue
from ....core.system.extras import require
from ....events.errors import describe_error
from ..cluster import connect, intervals
from ..storage.checkpoints import absolute_path, check_storage_path, repair_record
from .attempts import GroupTracker, RayValues, summarize_attempts
from .driver_loop import DriverLoop, OnReport
from .job import RayJob
from .mailbox import DriverChannel
from .options import check_address, check_failures, check_intervals, check_resources, check_storage, check_workers
from .sizes import NEVER, Sizes
from .worker import Call, run_worker

logger = logging.getLogger("heliograph")
START_TRIES = 10  # of Ray, to start the workers of an attempt


class RayLauncher:
    """Calls a function on workers of a Ray cluster, which train together; replaces workers that are lost.

    A function for `heliograph.launch` runs here unchanged: ranks, device and process group come from Ray Train.
    `RayReport` is added to each of its trainings; it reports to Ray, and after a loss of workers the training resumes
    from Ray's storage: with a `Checkpoint`, only the work since the last checkpoint is repeated.

    An exception of the function ends the run at once. If a worker dies or hangs, or its machine is lost, all workers
    are restarted, at most `max_failures` times, after a delay that doubles with each failure until the run gets further
    than before. If the cluster announces that a machine will be taken away, the run moves in time, without a failure.

    Args:
        num_workers: the number of workers; `(least, most)` for as many as the cluster has room for (a cluster that is
            started for the call has as many CPUs as this machine has cores). Ray then checks every `resize_interval`
            seconds for room for more, and restarts all workers with them. The function has to handle different
            numbers: see `as_ranks`.
        as_ranks: use only numbers of workers that divide this one: pass the `as_ranks` that the function gives to its
            data and to `GradientAccumulation`. If there is room for seven of eight, four are started; when there is
            room for more, the run saves before the restart.
        use_gpu: whether each worker gets a GPU.
        resources_per_worker: what Ray reserves for a worker, by name; by default 1 CPU, or 1 GPU.
        max_failures: how many times lost or hung workers are replaced; -1 for any number.
        backoff: seconds before the second attempt.
        grace: seconds that the other workers have to end after one has failed, and that all have after this process was
            asked to end.
        storage_path: where Ray keeps what is reported: a folder that all machines share, or an address such as
            `s3://...`. By default `~/ray_results`, which is enough for one machine.
        name: the name of the run in the storage. With `Checkpoint(resume="auto")`, a call with the same name continues
            what an earlier process has stored there; a finished run then returns at once. By default a new name, which
            no other call continues.
        keep: how many of the newest stored checkpoints are kept; None for all.
        address: of the cluster: `auto` or `host:port`. None uses the one that this process is connected to, or that
            `RAY_ADDRESS` names, or starts one on this machine for the time of the call: with a CPU for each core, or
            for the least number of workers if that is more; they then share the cores.
        check_interval: seconds between two checks of the workers by Ray, for which a report waits too; Ray's default,
            2, if None.
        start_timeout: seconds that workers have to start before Ray tries again; Ray's default, 60, if None.
        resize_interval: seconds between two checks for room for more workers; Ray's default, 60, if None.

    Raises:
        ImportError: Ray is not installed.
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of its range.
    """

    _on_report: OnReport | None = None  # set by a search, which decides on what is reported

    def __init__(
        self,
        num_workers: int | tuple[int, int] = 1,
        *,
        as_ranks: int | None = None,
        use_gpu: bool = False,
        resources_per_worker: Mapping[str, float] | None = None,
        max_failures: int = 0,
        backoff: float = 1.0,
        grace: float = 30.0,
        storage_path: str | Path | None = None,
        name: str | None = None,
        keep: int | None = 2,
        address: str | None = None,
        check_interval: float | None = None,
        start_timeout: float | None = None,
        resize_interval: float | None = None,
    ) -> None:
        least, most = check_workers(num_workers, as_ranks)
        check_resources(use_gpu, resources_per_worker)
        check_failures(max_failures, backoff, grace)
        check_storage(storage_path, name, keep)
        check_address(address)
        check_intervals(check_interval=check_interval, start_timeout=start_timeout, resize_interval=resize_interval)
        self._max_failures, self._backoff, self._grace = max_failures, float(backoff), float(grace)
        self._name, self._address = name, address
        self._variables = intervals(check_interval, start_timeout)
        train = require("ray.train", "RayLauncher", extra="ray")
        interval = NEVER if as_ranks is not None else resize_interval
        self._scaling = partial(
            train.ScalingConfig,
            use_gpu=use_gpu,
            resources_per_worker=None if resources_per_worker is None else dict(resources_per_worker),
            **({} if interval is None else {"elastic_resize_monitor_interval_s": interval}),
        )
        each: Mapping[str, float] = self._scaling(num_workers=1).total_resources
        self._sizes = partial(Sizes, least, most, as_ranks, each, resize_interval)  # each call makes its own
        fewest = self._sizes().allowed[0]  # raises if no number is allowed
        self._cpus = math.ceil(fewest * each.get("CPU", 0))
        self._needed = {name: amount * fewest for name, amount in each.items()}
        self._run_options = {
            "storage_path": None if storage_path is None else absolute_path(storage_path),
            "failure_config": train.FailureConfig(
                max_failures=0, max_preemption_failures=0, controller_failure_limit=START_TRIES
            ),
            "checkpoint_config": train.CheckpointConfig(num_to_keep=keep),
            "logging_config": train.LoggingConfig("WARNING"),  # otherwise it prints a line for each report and rank
        }

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        on_message: Callable[[int, Any], object] | None = None,
        **kwargs: Any,
    ) -> RayValues:
        """Call `fn(*args, **kwargs)` on every worker; return what each returned.

        The workers import a function of a module; a function of the script or of a notebook is sent to them.
        Arguments, values and messages are pickled and pass through this process's machine: use plain data, and a
        checkpoint for weights. Relative paths in `fn` refer to a folder of Ray for this run and machine.

        If `fn` raises, `run` raises the error as `launch` does: with its own type, cause and attributes, its traceback
        and the errors of other ranks in its notes, its rank in `heliograph_rank`; a SystemExit too. On Ctrl-C or
        SIGTERM the trainings save and stop, and `fn` ends by a SystemExit, as on a notice of the cluster; a second
        Ctrl-C does not wait for that.

        Args:
            fn: what each worker calls, in a thread of its process.
            args: its positional arguments.
            on_message: called in this thread with (rank, object) for each object that a rank puts into its queue
                (`run.queue`), while the workers run; if it raises, they are asked to end. By default, messages are
                kept in the returned `RayValues`.
            kwargs: its keyword arguments.

        Raises:
            ConnectionError: there is no cluster at the address.
            OSError: `storage_path` cannot be reached, created or written to.
            TimeoutError: the cluster had no room for the workers each time that Ray waited `start_timeout` for it.
            TypeError: `fn`, its arguments or its value cannot be pickled; `on_message` is not a function.
            RankFailed: a worker died or hung, once more than `max_failures`.
            RuntimeError: this process is connected to another cluster, or is itself a rank.
            ValueError: no cluster was named, and this machine does not have what the workers take; `storage_path` or
                `RAY_ADDRESS` is not valid.
            KeyboardInterrupt: on Ctrl-C.
            BaseException: what `fn` or `on_message` raised, or Ray, if it could not start the workers.
        """
        _refuse_nesting()
        if on_message is not None and not callable(on_message):
            raise TypeError(f"on_message takes a function of a rank and an object, or None; got {on_message!r}.")
        payload = _pickle(fn, args, kwargs)
        run_config = self._run_config()
        check_storage_path(run_config.storage_path)
        messages: list[tuple[int, Any]] = []
        with (
            connect(self._address, needed=self._needed, cpus=self._cpus),
            environment(self._variables),
            closing(DriverChannel()) as channel,
        ):
            tracker = GroupTracker()
            loop = DriverLoop(
                channel,
                tracker,
                self._grace,
                on_message or (lambda *message: messages.append(message)),
                self._on_report,
            )
            sizes, mailbox = self._sizes(), channel.mailbox
            call = partial(Call, uuid4().hex, mailbox=mailbox, payload=payload, grace=self._grace, sizes=sizes.allowed)
            job = RayJob(
                loop,
                tracker,
                sizes,
                lambda fit: self._trainer(call(fit=fit), sizes.asked, run_config),
                max_failures=self._max_failures,
                backoff=self._backoff,
            )
            group = job.run()
        values = [_value(rank, group.values[rank]) for rank in range(group.world_size)]
        results = [pickle.loads(each) for each in group.results]  # noqa: S301  # from our own workers
        storage = f"{run_config.storage_path}/{run_config.name}"
        return RayValues(values, messages, results, summarize_attempts(tracker.groups), storage)

    def _run_config(self) -> Any:
        train = require("ray.train", "RayLauncher", extra="ray")
        return train.RunConfig(name=self._name or f"heliograph-{uuid4().hex[:12]}", **self._run_options)

    def _trainer(self, call: Call, num_workers: int | tuple[int, int], run_config: Any) -> Any:
        train = require("ray.train.torch", "RayLauncher", extra="ray")
        if warning := repair_record(run_config.storage_path, run_config.name):
            logger.warning(warning)
        scaling = self._scaling(num_workers=num_workers)
        return train.TorchTrainer(partial(run_worker, call), scaling_config=scaling, run_config=run_config)


def _refuse_nesting() -> None:
    if child_queue() is not None:
        raise RuntimeError(
            "RayLauncher.run was called in a rank that RayLauncher or launch has started. Call it in the script, once; "
            "in a rank, call the function itself."
        )


def _pickle(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
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
