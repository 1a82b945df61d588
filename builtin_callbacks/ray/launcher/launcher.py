"""Start workers on a cluster that train together, as `launch` does on one machine."""

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
from ..cluster import connected, intervals
from ..storage.checkpoints import check_usable, mend_record, whole_path
from .attempts import Journal, RayValues, attempts
from .driver_loop import Hearing, OnReport
from .job import RayJob
from .mailbox import Desk
from .options import check_address, check_failures, check_intervals, check_resources, check_storage, check_workers
from .sizes import NEVER, Sizes
from .worker import Call, enter

logger = logging.getLogger("heliograph")
STARTS = 10  # how often Ray tries to start the workers of an attempt


class RayLauncher:
    """Calls a function on workers of a Ray cluster, which train together; makes up for those that are lost.

    What `heliograph.launch` takes runs here unchanged: ranks, device and process group come from Ray Train. Every
    training in it reports to Ray by `RayReport`, which is added, and goes on from what is stored there when workers are
    lost: with a `Checkpoint` in it, only the work since the last checkpoint is repeated.

    An exception of the function ends the run at once. A worker that dies or hangs, or whose machine is lost, is made up
    for `max_failures` times: all workers are started anew, after a pause that doubles with each failure until the run
    gets further than before. A machine that the cluster takes away with notice is left in time, which is no failure.

    Args:
        num_workers: how many workers; `(least, most)` for as many as the cluster has room for: one that is started
            for the call has room for as many as this machine has cores. Ray then looks every `resize_interval`
            seconds for room for more, and starts all anew with them. What the function does about
            another number is its own business: see `as_ranks`.
        as_ranks: of the numbers of workers that there may be, take only those that divide this one: as the function
            wants them where it gives `as_ranks` to its data and to `GradientAccumulation`. Where there is room for
            seven of eight, four are taken; where there is room for more again, the run saves first.
        use_gpu: whether each worker gets a GPU.
        resources_per_worker: what Ray sets aside for a worker, by name; by default 1 CPU, or 1 GPU.
        max_failures: how many lost or hung workers are made up for; -1 for any number.
        backoff: seconds before the first new attempt.
        grace: seconds that the other workers have to end when one has failed, and that all have when this process was
            asked to end.
        storage_path: where Ray keeps what is reported: a folder that all machines share, or `s3://...` and the like. By
            default `~/ray_results`, which does for one machine.
        name: of the run in the storage. The same call with the same name goes on with what an earlier process has
            stored there where `Checkpoint(resume="auto")` says so: a run that was finished returns at once, then. By
            default a new one, which no other call goes on with.
        keep: how many stored checkpoints are kept, the newest ones; None for all.
        address: of the cluster: `auto` or `host:port`. None takes the one that this process is connected to, or that
            `RAY_ADDRESS` names, or starts one on this machine for as long as a call takes: with a CPU for each core,
            or for the least number of workers if that takes more, which share the cores then.
        check_interval: seconds between two looks of Ray at its workers, for which a report waits too; Ray's own
            default, 2, if None.
        start_timeout: seconds that workers have to start, before Ray tries it again; Ray's own default, 60, if None.
        resize_interval: seconds between two looks for room for more workers; Ray's own default, 60, if None.

    Raises:
        ImportError: Ray is not installed.
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of its range.
    """

    _on_report: OnReport | None = None  # a search decides by what is reported

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
        looks = NEVER if as_ranks is not None else resize_interval
        self._scaling = partial(
            train.ScalingConfig,
            use_gpu=use_gpu,
            resources_per_worker=None if resources_per_worker is None else dict(resources_per_worker),
            **({} if looks is None else {"elastic_resize_monitor_interval_s": looks}),
        )
        each: Mapping[str, float] = self._scaling(num_workers=1).total_resources
        self._sizes = partial(Sizes, least, most, as_ranks, each, resize_interval)  # each call begins with its own
        fewest = self._sizes().allowed[0]  # refuses numbers of which none will do
        self._cpus = math.ceil(fewest * each.get("CPU", 0))
        self._needed = {name: amount * fewest for name, amount in each.items()}
        self._storing = {
            "storage_path": None if storage_path is None else whole_path(storage_path),
            "failure_config": train.FailureConfig(
                max_failures=0, max_preemption_failures=0, controller_failure_limit=STARTS
            ),
            "checkpoint_config": train.CheckpointConfig(num_to_keep=keep),
            "logging_config": train.LoggingConfig("WARNING"),  # else it prints a line for each report and rank
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

        It may be any function: one of a module is imported by the workers, one of the script or of a notebook is sent.
        Arguments, values and messages are pickled, and pass through this process's machine: plain data, not weights,
        which a checkpoint holds. A relative path in `fn` leads to a folder of Ray's own for this run and machine.

        When `fn` raises, the error leaves run here as it leaves `launch`: with its own type, cause and attributes, its
        traceback and the errors of other ranks in its notes, its rank in `heliograph_rank`. A SystemExit leaves as
        well. Upon Ctrl-C or SIGTERM the trainings save, stop, and leave `fn` by a SystemExit, as upon a notice of the
        cluster's; a second Ctrl-C does not wait for that.

        Args:
            fn: what each worker calls, in a thread of its process.
            args: its positional arguments.
            on_message: called in this thread with rank and object for everything that a rank puts into its queue
                (`run.queue`), while the workers run; when it raises, they are asked to end. By default, messages are
                kept.
            kwargs: its keyword arguments.

        Raises:
            ConnectionError: there is no cluster at the address.
            OSError: `storage_path` cannot be reached, created or written to.
            TimeoutError: the cluster had no room for the workers, as often as Ray waited `start_timeout` for it.
            TypeError: `fn`, its arguments or its value cannot be pickled; `on_message` is no function.
            RankFailed: a worker died or hung, once more than `max_failures`.
            RuntimeError: this process is connected to another cluster, or is itself a rank.
            ValueError: no cluster was named, and this machine does not have what the workers take; `storage_path` or
                `RAY_ADDRESS` names nothing that there is.
            KeyboardInterrupt: upon Ctrl-C.
            BaseException: what `fn` or `on_message` raised; what Ray did, where it could not start the workers.
        """
        _refuse_nesting()
        if on_message is not None and not callable(on_message):
            raise TypeError(f"on_message is a function of a rank and an object, or None; got {on_message!r}.")
        payload = _pickled(fn, args, kwargs)
        run_config = self._run_config()
        check_usable(run_config.storage_path)
        messages: list[tuple[int, Any]] = []
        with (
            connected(self._address, needed=self._needed, cpus=self._cpus),
            environment(self._variables),
            closing(Desk()) as desk,
        ):
            journal = Journal()
            hearing = Hearing(
                desk, journal, self._grace, on_message or (lambda *message: messages.append(message)), self._on_report
            )
            sizes, mailbox = self._sizes(), desk.mailbox
            call = partial(Call, uuid4().hex, mailbox=mailbox, payload=payload, grace=self._grace, sizes=sizes.allowed)
            job = RayJob(
                hearing,
                journal,
                sizes,
                lambda fit: self._trainer(call(fit=fit), sizes.asked, run_config),
                max_failures=self._max_failures,
                backoff=self._backoff,
            )
            group = job.run()
        values = [_value(rank, group.values[rank]) for rank in range(group.world_size)]
        results = [pickle.loads(each) for each in group.results]  # noqa: S301  # from our own workers
        storage = f"{run_config.storage_path}/{run_config.name}"
        return RayValues(values, messages, results, attempts(journal.groups), storage)

    def _run_config(self) -> Any:
        train = require("ray.train", "RayLauncher", extra="ray")
        return train.RunConfig(name=self._name or f"heliograph-{uuid4().hex[:12]}", **self._storing)

    def _trainer(self, call: Call, num_workers: int | tuple[int, int], run_config: Any) -> Any:
        train = require("ray.train.torch", "RayLauncher", extra="ray")
        if said := mend_record(run_config.storage_path, run_config.name):
            logger.warning(said)
        scaling = self._scaling(num_workers=num_workers)
        return train.TorchTrainer(partial(enter, call), scaling_config=scaling, run_config=run_config)


def _refuse_nesting() -> None:
    if child_queue() is not None:
        raise RuntimeError(
            "RayLauncher.run was called in a rank that it, or launch, has started. Call it once, from the script only; "
            "within a rank, call the function itself."
        )


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
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
