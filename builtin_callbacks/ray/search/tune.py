"""Search for hyper-parameters with Ray Tune: many runs, of which a scheduler stops those that are not worth it."""

from __future__ import annotations

import logging
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from ....core.metrics.monitor import Monitor
from ....core.system.extras import require
from ....events.checks import check_whole_number
from ..cluster import connected
from ..launcher.launcher import RayLauncher
from .places import Place, place_of
from .trainable import Plan, closing, trainable
from .trial_session import PURPOSE
from .trials import Search, read_search

NEXT_TO_NOTHING = {"memory": 1}  # a byte: Tune wants some resource for a trial whose workers have their own

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
    """Search for hyper-parameters: call `fn(config)` once for each trial, with values from the space.

    Every training in it reports to Tune by `RayReport`, which is added: at every checkpoint, and at every validation.
    A report has all metrics, `epoch` and `step`, so `ASHAScheduler(time_attr="epoch", max_t=20)` means what it says.
    Where Tune stops a trial, its run stops as by any plugin: it closes properly, and its result says `stopped` by
    `tune`. What `fn` returns is not used.

    Population based training pauses a trial and has it go on from the checkpoint of a better one, with other
    hyper-parameters: those win over what the checkpoint's optimizers and schedulers were told, see `docs/search.md`.
    So all trials use the same run name, and save where they validate.

    A trial works in an empty folder of its own, to which relative paths refer. It begins with the first line of `fn`
    again where it goes on, and its trainings go on from what was reported, whatever their `Checkpoint` is told.

    An exception in a trial ends that trial; the search goes on. If all have failed, the error of the first is raised.

    Args:
        fn: gets the hyper-parameters as a dict. On several workers it is called on each, as by `RayLauncher`.
        space: hyper-parameters by name: values, or what to draw them from, such as `ray.tune.loguniform(1e-4, 1e-1)`.
        metric: what the search goes by, such as `validation/loss`.
        mode: whether smaller (`min`) or larger (`max`) is better; may be left out for a loss or an error.
        num_samples: how many trials, or how often a grid is gone through.
        scheduler: one of `ray.tune.schedulers`, without metric and mode; None lets every trial run to its end.
        search_alg: one of `ray.tune.search`, without metric and mode; None draws at random.
        num_workers: how many workers a trial trains on. A single one, with no `max_failures`, is the trial's process.
        use_gpu: whether each worker gets a GPU.
        resources_per_worker: what Ray sets aside for a worker, by name; by default 1 CPU, or 1 GPU.
        max_failures: how many lost or hung workers are made up for in each trial.
        max_concurrent: how many trials run at a time; by default, as many as the cluster has room for.
        storage_path: where Ray keeps what is reported: a folder that all machines share, or `s3://...` and the like. By
            default `~/ray_results`, which does for one machine.
        name: of the search in the storage; by default a new one.
        resume: `auto` goes on with the search of this name, if there is one: trials that were under way, or failed, go
            on from their last report. With None, the name must be new.
        keep: how many checkpoints of each trial are stored: the best by the metric, and the newest. None for all;
            population based training needs more than 2, or one may be gone before another trial has it.
        address: of the cluster: `auto` or `host:port`. None takes the one that this process is connected to, or that
            `RAY_ADDRESS` names, or starts one on this machine for as long as the search takes.

    Returns:
        The trials; `search.best` is the best one, and `search.best.fetch(folder)` its checkpoint. Another process finds
        them by `tune_results(storage_path, name)`.

    Raises:
        ImportError: Ray is not installed.
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of its range, or there is a search of this name; of Tune's, where scheduler,
            search_alg and space contradict each other.
        KeyboardInterrupt: upon Ctrl-C, when the trials have stopped; `resume="auto"` goes on.
        BaseException: what `fn` raised in the first trial, if every one failed.
    """
    ray_tune = require("ray.tune", PURPOSE, extra="ray")
    monitor = Monitor(metric, mode)
    _check(fn, space, resume, name)
    limits = {"max_concurrent": max_concurrent, "keep": keep}
    _check_counts(num_workers=num_workers, num_samples=num_samples)
    _check_counts(**{what: number for what, number in limits.items() if number is not None})
    workers = _workers(num_workers, use_gpu=use_gpu, resources=resources_per_worker, max_failures=max_failures)
    place = place_of(storage_path, name or f"heliograph-{uuid4().hex[:12]}")
    each = dict(resources_per_worker or ({"GPU": 1} if use_gpu else {"CPU": 1}))
    plan = Plan(fn, metric, place, workers, each if workers is None else NEXT_TO_NOTHING)
    needed = {name: num_workers * amount for name, amount in each.items()}
    with connected(address, needed=needed, cpus=math.ceil(needed.get("CPU", 0))), _tune_apart():
        limit = max_concurrent or (None if plan.workers is None else _room(each, num_workers))
        asked = {"num_samples": num_samples, "scheduler": scheduler, "search_alg": search_alg}
        if place.has_begun():
            _check_same(place, monitor, resume)
            tuner = ray_tune.Tuner.restore(place.path, trainable(plan), resume_unfinished=True, resume_errored=True)
        else:
            tuner = _new(plan, space, monitor, keep, {**asked, "max_concurrent_trials": limit})
        tuner.fit()
    search = read_search(place, monitor.name, monitor.mode)
    if not search.is_finished:
        raise KeyboardInterrupt  # Tune has caught it, to stop the trials
    _tell_failures(search)
    return search


def _workers(
    num_workers: int, *, use_gpu: bool, resources: Mapping[str, float] | None, max_failures: int
) -> dict[str, Any] | None:
    """Return arguments for the launcher of a trial; None where a trial trains in its own process."""
    options: dict[str, Any] = {"num_workers": num_workers, "use_gpu": use_gpu, "max_failures": max_failures}
    options["resources_per_worker"] = resources
    RayLauncher(**options)  # refuses what it does not take, before anything starts
    return options if num_workers > 1 or max_failures else None


def _new(plan: Plan, space: dict[str, Any], monitor: Monitor, keep: int | None, asked: dict[str, Any]) -> Any:
    ray_tune = require("ray.tune", PURPOSE, extra="ray")
    plan.place.write(_goal(monitor))
    stored = ray_tune.CheckpointConfig(
        num_to_keep=keep, checkpoint_score_attribute=monitor.name, checkpoint_score_order=monitor.mode
    )
    return ray_tune.Tuner(
        trainable(plan),
        param_space=space,
        tune_config=ray_tune.TuneConfig(metric=monitor.name, mode=monitor.mode, **asked),
        run_config=ray_tune.RunConfig(
            name=plan.place.name, storage_path=plan.place.storage, checkpoint_config=stored, callbacks=[closing()]
        ),
    )


def _goal(monitor: Monitor) -> dict[str, Any]:
    return {"metric": monitor.name, "mode": monitor.mode}


def _check_same(place: Place, monitor: Monitor, resume: str | None) -> None:
    """Raise ValueError where a search that is there is not to be gone on with, or not like this."""
    if resume is None:
        raise ValueError(
            f"There is a search {place.name!r} in {place.storage}: resume='auto' goes on with it; give another name "
            f"for a new one."
        )
    if (went_by := place.read()) != _goal(monitor):
        raise ValueError(f"The search {place.name!r} in {place.storage} goes by {went_by}: go on by the same.")


def _room(each: Mapping[str, float], num_workers: int) -> int:
    """Return for how many trials on several workers the cluster has room now: Tune does not see what they need."""
    there = require("ray", PURPOSE, extra="ray").cluster_resources()
    rooms = [there.get(name, 0.0) // (amount * num_workers) for name, amount in each.items() if amount]
    return max(1, int(min(rooms, default=1)))


def _tell_failures(search: Search) -> None:
    """Log what failed; raise the error of the first where all did."""
    for trial in search:
        if trial.status == "failed":
            logger.error("trial %d failed: %s", trial.number, trial.reason)
    errors = [trial.error for trial in search if trial.error is not None]
    if errors and len(errors) == len(search):
        first = errors[0]
        first.add_note(f"heliograph: all {len(search)} trials of the search failed, this one first of them")
        raise first


@contextmanager
def _tune_apart() -> Iterator[None]:
    """Give back the signal handlers that Tune installs and leaves, and be spared its hint at what is not for us."""
    wanted = [signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]
    is_main = threading.current_thread() is threading.main_thread()
    former = {signum: signal.getsignal(signum) for signum in wanted} if is_main else {}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Consider boosting PBT performance")
            yield
    finally:
        for signum, handler in former.items():
            if handler is not None:  # installed by other than Python code, and so cannot be given back
                signal.signal(signum, handler)


def _check(fn: Any, space: Any, resume: Any, name: Any) -> None:
    if not callable(fn) or not isinstance(space, dict):
        raise TypeError(f"tune takes a function and a dict of hyper-parameters, got {fn!r} and {space!r}.")
    if resume not in (None, "auto"):
        raise ValueError(f"resume is None or 'auto', got {resume!r}.")
    if resume == "auto" and name is None:
        raise ValueError("resume='auto' goes on with the search of a name: give name=.")


def _check_counts(**counts: Any) -> None:
    for what, number in counts.items():
        check_whole_number(what, number, at_least=1)
