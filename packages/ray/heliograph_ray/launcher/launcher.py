"""A launcher for workers on a Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from heliograph.core.distributed.launcher import environment
from heliograph.spi import check_number, check_whole_number, is_number, is_whole_number, require

from ..cluster import CHECK_INTERVAL, START_TIMEOUT, check_address
from ..storage import absolute_path
from .attempts import RayValues
from .calls import Setup, pickle_call
from .capacity import Sizes
from .driver_loop import Fit, OnReport
from .kept import KeptWorkers
from .mailbox import DriverChannel, WorkerCall
from .worker import run_worker

START_TRIES = 10  # of Ray, to start the workers of an attempt


class RayLauncher:
    """Call a function on workers of a Ray cluster, which train together; replace lost workers.

    A function for `heliograph.launch` runs here unchanged: ranks, device and process group come from Ray Train.
    `RayReport` is added to each training. It reports to Ray; after a loss of workers the training resumes from Ray's
    storage. With a `Checkpoint`, only the work since the last checkpoint is repeated.

    An exception of the function ends the run at once. If a worker dies or hangs, or its machine is lost, all workers
    are restarted, at most `max_failures` times. The delay doubles with each failure until the run makes progress. If
    the cluster announces a preemption, the run moves in time, without a failure.

    Args:
        num_workers: the number of workers; `(least, most)` for as many as fit into the cluster. (A cluster that is
            started for the call has one CPU per core.) Ray then checks every `resize_interval` seconds for room for
            more, and restarts all workers in the larger number. The function must support different world sizes.
        use_gpu: whether each worker gets a GPU.
        resources_per_worker: the resources that Ray reserves for a worker, by name; by default 1 CPU, or 1 GPU.
        max_failures: how many times lost or hung workers are replaced; -1 for any number.
        backoff: seconds before the second attempt.
        grace: seconds that the other workers have to end after one has failed, and that all have after this process got
            a signal to end.
        storage_path: the storage of the reports: a folder that all machines share, or an address such as
            `s3://...`. By default `~/ray_results`, which is enough for one machine.
        name: the name of the run in the storage. With `Checkpoint(resume="auto")`, a call with the same name continues
            the run of an earlier process; a finished run then returns at once. By default a new, unique name.
        keep: how many of the newest stored checkpoints are kept; None for all.
        address: the address of the cluster: `auto` or `host:port`. None uses the one that this process is connected to,
            or that `RAY_ADDRESS` names, or starts one on this machine for the time of the call. That has a CPU for each
            core, or for the minimum number of workers if that is more; they then share the cores.
        check_interval: seconds between two checks of the workers by Ray, for which a report waits too; Ray's default,
            2, if None.
        start_timeout: seconds that workers have to start before Ray tries again; Ray's default, 60, if None.
        resize_interval: seconds between two checks for room for more workers; Ray's default, 60, if None.
        idle: seconds without a call after which a `CreatorTrainer` ends its workers.

    Raises:
        ImportError: Ray is not installed.
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of its range.
    """

    _on_report: OnReport | None = None  # set by a search, which may stop a trial after a report

    def __init__(
        self,
        num_workers: int | tuple[int, int] = 1,
        *,
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
        idle: float = 60.0,
    ) -> None:
        least, most = check_workers(num_workers)
        check_resources(use_gpu, resources_per_worker)
        check_whole_number("max_failures, -1 for any number,", max_failures, at_least=-1)
        check_number("backoff", backoff, of="seconds", at_least=0)
        check_number("grace", grace, of="seconds", more_than=0)
        check_storage(storage_path, name, keep)
        check_address(address)
        periods = {"check_interval": check_interval, "start_timeout": start_timeout, "resize_interval": resize_interval}
        for option, seconds in {**periods, "idle": idle}.items():
            if seconds is not None or option == "idle":
                check_number(option, seconds, of="seconds", more_than=0)
        train = require("ray.train", "RayLauncher", extra="ray")
        scaling = partial(
            train.ScalingConfig,
            use_gpu=use_gpu,
            resources_per_worker=None if resources_per_worker is None else dict(resources_per_worker),
            **({} if resize_interval is None else {"elastic_resize_monitor_interval_s": resize_interval}),
        )
        resources: Mapping[str, float] = scaling(num_workers=1).total_resources
        run_options = {
            "storage_path": None if storage_path is None else absolute_path(storage_path),
            "failure_config": train.FailureConfig(
                max_failures=0, max_preemption_failures=0, controller_failure_limit=START_TRIES
            ),
            "checkpoint_config": train.CheckpointConfig(num_to_keep=keep),
            "logging_config": train.LoggingConfig("WARNING"),  # Ray would print a line for each report and rank
        }
        variables = {CHECK_INTERVAL: check_interval, START_TIMEOUT: start_timeout}
        self._setup = Setup(
            address=address,
            variables={name: str(seconds) for name, seconds in variables.items() if seconds is not None},
            sizes=Sizes(least, most, resources),
            scaling=scaling,
            run_config=partial(train.RunConfig, **run_options),
            name=name,
            max_failures=max_failures,
            backoff=float(backoff),
            grace=float(grace),
        )
        self._idle = float(idle)

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        on_message: Callable[[int, Any], object] | None = None,
        **kwargs: Any,
    ) -> RayValues:
        """Call `fn(*args, **kwargs)` on every worker; return the values by rank.

        The workers import a function of a module; a function of the script or of a notebook is sent to them.
        Arguments, values and messages are pickled and pass through this process's machine: use plain data, and a
        checkpoint for weights. Relative paths in `fn` refer to a folder of Ray for this run and machine.

        If `fn` raises, `run` raises the same error as `launch` does: with its type, cause and attributes, with its
        traceback and the errors of other ranks in its notes, and with its rank in `heliograph_rank`. This includes
        SystemExit. On Ctrl-C or SIGTERM the trainings save and stop, and `fn` ends by a SystemExit, as on a preemption
        notice; a second Ctrl-C does not wait for that.

        Args:
            fn: the function, which each worker calls in a thread of its process.
            args: its positional arguments.
            on_message: called in this thread with (rank, object) for each object that a rank puts into its queue
                (`run.report.queue`), while the workers run; if it raises, the workers are asked to end. By default,
                messages are kept in the returned `RayValues`.
            kwargs: its keyword arguments.

        Raises:
            ConnectionError: there is no cluster at the address.
            OSError: `storage_path` cannot be reached, created or written to.
            TimeoutError: the cluster had no room for the workers within `start_timeout`, in each of Ray's tries.
            TypeError: `fn`, its arguments or its value cannot be pickled; `on_message` is not a function.
            RankFailed: a worker died or hung, once more than `max_failures`.
            RuntimeError: this process is connected to another cluster, or is itself a rank.
            ValueError: no cluster was named, and this machine does not have the resources of the workers;
                `storage_path` or `RAY_ADDRESS` is not valid.
            KeyboardInterrupt: on Ctrl-C.
            BaseException: the exception of `fn`, of `on_message`, or of Ray if it could not start the workers.
        """
        payload, setup = pickle_call(fn, args, kwargs, on_message), self._setup
        run_config = setup.new_run_config()

        def start(call: WorkerCall) -> Fit:
            return Fit(setup.trainer(partial(run_worker, call), run_config).fit)

        with setup.connect(), environment(setup.variables), closing(DriverChannel()) as channel:
            return setup.run(channel, payload, run_config, start, on_message, on_report=self._on_report)

    def keep_ranks(self) -> KeptWorkers:
        """Return workers that stay alive between calls of their `run`."""
        return KeptWorkers(self._setup, self._idle)


def check_workers(num_workers: Any) -> tuple[int, int]:
    pair = num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)
    if len(pair) != 2 or not all(map(is_whole_number, pair)):
        raise TypeError(f"num_workers is a whole number, or (least, most) of them; got {num_workers!r}.")
    if not 1 <= pair[0] <= pair[1]:
        raise ValueError(f"num_workers is at least 1, and (least, most) are in this order; got {num_workers!r}.")
    return pair


def check_resources(use_gpu: bool, resources_per_worker: Mapping[str, float] | None) -> None:
    if resources_per_worker is None:
        return
    amounts = list(resources_per_worker.values())
    if not all(is_number(amount) and 0 <= amount < math.inf for amount in amounts) or not (use_gpu or any(amounts)):
        raise ValueError(
            f"resources_per_worker maps names to numbers of at least 0 and reserves something, for example "
            f"{{'CPU': 1}}; got {resources_per_worker!r}."
        )


def check_storage(storage_path: str | Path | None, name: str | None, keep: int | None) -> None:
    if storage_path == "":
        raise ValueError("storage_path is a folder, an address such as 's3://...', or None; got ''.")
    if name is not None and (not name.strip(".") or "/" in name or "\\" in name):
        raise ValueError(f"name becomes the name of a folder in the storage, so it has no slashes; got {name!r}.")
    if keep is not None:
        check_whole_number("keep", keep, at_least=1, or_else="None for all")
