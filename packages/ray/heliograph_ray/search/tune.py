"""Hyper-parameter search with Ray Tune."""

from __future__ import annotations

import logging
import math
import signal
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from heliograph.spi import Monitor, check_whole_number, require

from ..cluster import connect, restored_handlers
from ..launcher.launcher import RayLauncher
from .location import Location, search_location
from .results import Search, read_search
from .trial import PURPOSE, Plan, close_callback, trainable

MINIMAL_RESOURCES = {"memory": 1}  # a byte: Tune requires a resource for a trial whose workers have their own

logger = logging.getLogger("heliograph")


def tune(
    fn: Callable[[dict[str, Any]], object],
    space: dict[str, Any],
    *,
    metric: str,
    mode: Literal["min", "max"] | None = None,
    num_samples: int = 1,
    scheduler: Any = None,
    search_alg: Any = None,
    num_workers: int = 1,
    use_gpu: bool = False,
    resources_per_worker: Mapping[str, float] | None = None,
    max_failures: int = 0,
    max_concurrent: int | None = None,
    storage_path: str | Path | None = None,
    name: str | None = None,
    resume: Literal["auto"] | None = None,
    keep: int | None = None,
    address: str | None = None,
) -> Search:
    """Search for hyper-parameters with Ray Tune: call `fn(config)` once for each trial.

    `RayReport` is added to each training and reports to Tune, at every checkpoint and every validation. A
    report has all metrics, `epoch` and `step`: use them as in `ASHAScheduler(time_attr="epoch", max_t=20)`. If Tune
    stops a trial, its run stops as if a plugin had requested it: it is closed, and its result says `stopped` by `tune`.
    The return value of `fn` is not used.

    Population based training pauses a trial and lets it resume the checkpoint of a better one, with other
    hyper-parameters, which replace the ones in the optimizers and schedulers (see
    `docs/howto/search_hyperparameters.md`). All
    trials therefore need the same run name, and must save when they validate.

    A trial runs in its own empty folder, to which relative paths refer. When it is resumed, `fn` is called again,
    and its trainings resume the reported checkpoint, whatever `resume=` of their `Checkpoint` is.

    An exception in a trial ends only that trial. If all have failed, the error of the first is raised.

    Args:
        fn: called with the hyper-parameters, a dict; with several workers on each of them, as by `RayLauncher`.
        space: hyper-parameters by name: values, or distributions such as `ray.tune.loguniform(1e-4, 1e-1)`.
        metric: the metric to optimize, such as `validation/loss`.
        mode: whether smaller (`min`) or larger (`max`) is better; optional for a loss or an error.
        num_samples: the number of trials; with a grid, how many times each of its points is tried.
        scheduler: a scheduler of `ray.tune.schedulers`, without metric and mode; None lets every trial finish.
        search_alg: an algorithm of `ray.tune.search`, without metric and mode; None samples at random.
        num_workers: the number of workers of a trial. A single one without `max_failures` is the trial's process.
        use_gpu: whether each worker gets a GPU.
        resources_per_worker: the resources that Ray reserves for a worker, by name; by default 1 CPU, or 1 GPU.
        max_failures: how many times lost or hung workers are replaced in each trial.
        max_concurrent: how many trials run at a time; by default, as many as fit into the cluster.
        storage_path: the storage of the reports: a folder that all machines share, or an address such as
            `s3://...`. By default `~/ray_results`, which is enough for one machine.
        name: the name of the search in the storage; by default a new one.
        resume: `auto` continues the search of this name, if it exists: unfinished and failed trials resume their
            last report. With None, the name must be new.
        keep: how many checkpoints of each trial are stored: the best by the metric, and the newest. None for all;
            population based training needs more than 2, or one may be removed before another trial has copied it.
        address: the address of the cluster: `auto` or `host:port`. None uses the one that this process is connected to,
            or that `RAY_ADDRESS` names, or starts one on this machine for the time of the search.

    Returns:
        The trials; `search.best` is the best one, and `search.best.fetch(folder)` its checkpoint. Another process reads
        them with `tune_results(storage_path, name)`.

    Raises:
        ImportError: Ray is not installed.
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range, or a search of this name exists; also raised by Tune if
            scheduler, search_alg and space contradict each other.
        KeyboardInterrupt: on Ctrl-C, when the trials have stopped; `resume="auto"` continues the search.
        BaseException: the exception of `fn` in the first trial, if every trial failed.
    """
    ray_tune = require("ray.tune", PURPOSE, extra="ray")
    monitor = Monitor(metric, mode)
    _check(fn, space, resume, name)
    check_whole_number("num_workers", num_workers, at_least=1)
    check_whole_number("num_samples", num_samples, at_least=1)
    for option, number in (("max_concurrent", max_concurrent), ("keep", keep)):
        if number is not None:
            check_whole_number(option, number, at_least=1)
    launcher: dict[str, Any] = {"num_workers": num_workers, "use_gpu": use_gpu, "max_failures": max_failures}
    launcher["resources_per_worker"] = resources_per_worker
    RayLauncher(**launcher)  # checks its arguments before anything starts
    workers = launcher if num_workers > 1 or max_failures else None
    location = search_location(storage_path, name or f"heliograph-{uuid4().hex[:12]}")
    worker_resources = dict(resources_per_worker or ({"GPU": 1} if use_gpu else {"CPU": 1}))
    plan = Plan(fn, metric, location, workers, worker_resources if workers is None else MINIMAL_RESOURCES)
    needed = {name: num_workers * amount for name, amount in worker_resources.items()}
    with (
        connect(address, needed=needed, cpus=math.ceil(needed.get("CPU", 0))),
        restored_handlers(signal.SIGINT, signal.SIGUSR1),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Consider boosting PBT performance")
        limit = max_concurrent or (None if plan.workers is None else _max_concurrent(worker_resources, num_workers))
        options = {"num_samples": num_samples, "scheduler": scheduler, "search_alg": search_alg}
        if location.has_state():
            _check_resume(location, monitor, resume)
            tuner = ray_tune.Tuner.restore(location.path, trainable(plan), resume_unfinished=True, resume_errored=True)
        else:
            tuner = _new(plan, space, monitor, keep, {**options, "max_concurrent_trials": limit})
        tuner.fit()
    search = read_search(location, monitor.name, monitor.mode)
    if not search.is_finished:
        raise KeyboardInterrupt  # Tune caught it, to stop the trials
    _log_failures(search)
    return search


def _new(plan: Plan, space: dict[str, Any], monitor: Monitor, keep: int | None, options: dict[str, Any]) -> Any:
    ray_tune = require("ray.tune", PURPOSE, extra="ray")
    plan.location.write(_goal(monitor))
    checkpoint_config = ray_tune.CheckpointConfig(
        num_to_keep=keep, checkpoint_score_attribute=monitor.name, checkpoint_score_order=monitor.mode
    )
    return ray_tune.Tuner(
        trainable(plan),
        param_space=space,
        tune_config=ray_tune.TuneConfig(metric=monitor.name, mode=monitor.mode, **options),
        run_config=ray_tune.RunConfig(
            name=plan.location.name,
            storage_path=plan.location.storage,
            checkpoint_config=checkpoint_config,
            callbacks=[close_callback()],
        ),
    )


def _goal(monitor: Monitor) -> dict[str, Any]:
    return {"metric": monitor.name, "mode": monitor.mode}


def _check_resume(location: Location, monitor: Monitor, resume: str | None) -> None:
    if resume is None:
        raise ValueError(
            f"{location.storage} already has a search {location.name!r}: continue it with resume='auto', or choose "
            f"another name."
        )
    if (goal := location.read()) != _goal(monitor):
        raise ValueError(
            f"The search {location.name!r} in {location.storage} optimizes {goal}: pass the same metric and mode."
        )


def _max_concurrent(worker_resources: Mapping[str, float], num_workers: int) -> int:
    total = require("ray", PURPOSE, extra="ray").cluster_resources()
    counts = [total.get(name, 0.0) // (amount * num_workers) for name, amount in worker_resources.items() if amount]
    return max(1, int(min(counts, default=1)))


def _log_failures(search: Search) -> None:
    for trial in search:
        if trial.status == "failed":
            logger.error("trial %d failed: %s", trial.number, trial.reason)
    errors = [trial.error for trial in search if trial.error is not None]
    if errors and len(errors) == len(search):
        first = errors[0]
        first.add_note(f"heliograph: all {len(search)} trials of the search failed; this is the error of the first")
        raise first


def _check(fn: Any, space: Any, resume: Any, name: Any) -> None:
    if not callable(fn) or not isinstance(space, dict):
        raise TypeError(f"tune takes a function and a dict of hyper-parameters, got {fn!r} and {space!r}.")
    if resume not in (None, "auto"):
        raise ValueError(f"resume is None or 'auto', got {resume!r}.")
    if resume == "auto" and name is None:
        raise ValueError("resume='auto' needs the name= of the search.")
