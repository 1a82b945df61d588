"""Start workers on a Ray cluster that train together, as `launch` does on one machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from heliograph.core.distributed.launcher import environment
from heliograph.spi import require

from ..cluster import intervals
from ..storage.checkpoints import absolute_path
from .attempts import RayValues
from .calls import Setup, pickle_call
from .driver_loop import OnReport
from .fit import Fit
from .kept import KeptWorkers
from .mailbox import Call, DriverChannel
from .options import check_address, check_failures, check_intervals, check_resources, check_storage, check_workers
from .sizes import Sizes
from .worker import run_worker

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
            numbers.
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
        idle: seconds without a call after which a `CreatorTrainer` gives up its workers.

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
        check_failures(max_failures, backoff, grace)
        check_storage(storage_path, name, keep)
        check_address(address)
        check_intervals(
            check_interval=check_interval, start_timeout=start_timeout, resize_interval=resize_interval, idle=idle
        )
        train = require("ray.train", "RayLauncher", extra="ray")
        scaling = partial(
            train.ScalingConfig,
            use_gpu=use_gpu,
            resources_per_worker=None if resources_per_worker is None else dict(resources_per_worker),
            **({} if resize_interval is None else {"elastic_resize_monitor_interval_s": resize_interval}),
        )
        each: Mapping[str, float] = scaling(num_workers=1).total_resources
        run_options = {
            "storage_path": None if storage_path is None else absolute_path(storage_path),
            "failure_config": train.FailureConfig(
                max_failures=0, max_preemption_failures=0, controller_failure_limit=START_TRIES
            ),
            "checkpoint_config": train.CheckpointConfig(num_to_keep=keep),
            "logging_config": train.LoggingConfig("WARNING"),  # otherwise it prints a line for each report and rank
        }
        self._setup = Setup(
            address=address,
            variables=intervals(check_interval, start_timeout),
            sizes=Sizes(least, most, each, resize_interval),
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
                (`run.report.queue`), while the workers run; if it raises, they are asked to end. By default, messages
                are kept in the returned `RayValues`.
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
        payload, setup = pickle_call(fn, args, kwargs, on_message), self._setup
        run_config = setup.new_run_config()

        def start(call: Call) -> Fit:
            return Fit(setup.trainer(partial(run_worker, call), run_config).fit)

        with setup.connect(), environment(setup.variables), closing(DriverChannel()) as channel:
            return setup.run(channel, payload, run_config, start, on_message, on_report=self._on_report)

    def keep_ranks(self) -> KeptWorkers:
        """Return workers that stay alive between calls of their `run`, for who calls several functions."""
        return KeptWorkers(self._setup, self._idle)
