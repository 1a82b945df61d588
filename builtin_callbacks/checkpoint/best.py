"""The best state of a run, restored at its end."""

from __future__ import annotations

from functools import partial
from math import isnan
from typing import Literal

from ...core.checkpoint import storage
from ...core.checkpoint.state.compatibility import load_scheduler
from ...core.checkpoint.state.frozen import with_frozen
from ...core.checkpoint.state.ranks import load_parts
from ...core.checkpoint.storage import State
from ...core.distributed.ranks.failure import on_main
from ...core.engines.weights import load_average, measured_average
from ...core.metrics.monitor import Monitor
from ...events import Run
from .resume import share_state

Extent = Literal["weights", "everything"]


def check_best(keep_best: int, monitor: str | None, mode: str | None, load_best: str | None, *, required: bool) -> None:
    """Raise ValueError unless the arguments of a `Checkpoint` about the best ones fit together.

    Args:
        keep_best: how many are kept.
        monitor: what they are chosen by; None for nothing.
        mode: which way that is better, as it was given.
        load_best: what is loaded back at the end; None for nothing.
        required: whether a run in which nothing can measure the metric is an error.
    """
    if mode is not None and monitor is None:
        raise ValueError(f"mode={mode!r} says which way monitor='validation/loss' is better: give that, too.")
    if load_best not in (None, "weights", "everything"):
        raise ValueError(f"load_best is 'weights', 'everything' or None, got {load_best!r}.")
    if load_best is not None and monitor is None:
        raise ValueError(f"load_best={load_best!r} needs keep_best=1 and monitor='validation/loss': the best of what?")
    if load_best is not None and not required:
        raise ValueError(f"load_best={load_best!r} needs a best checkpoint: leave monitor_required=False out.")
    if keep_best and monitor is None:
        raise ValueError(
            f"keep_best={keep_best} does not say the best of what: give the metric, as in monitor='validation/loss'."
        )
    if monitor is not None and not keep_best:
        raise ValueError(
            f"monitor={monitor!r} is what the best are chosen by, and keep_best=0 keeps none: give keep_best=1, or "
            f"leave monitor out."
        )


def load_best(run: Run, best: storage.Entry | None, monitor: Monitor, extent: Extent) -> str:
    """Give a run's task, optimizers and schedulers the state of its best checkpoint; return what was done, if anything.

    Where a plugin validates with weights of its own, such as an average, these are loaded: they were judged.

    On several ranks a collective.

    Args:
        run: the run, at the end of its training.
        best: on the main rank, the checkpoint as it was ranked; None or one that was judged NaN is none to load.
        monitor: what it was ranked by.
        extent: only the weights, or the optimizers and the schedulers too.

    Raises:
        FileNotFoundError: it is gone.
        ValueError: it is damaged, or no longer the one that was ranked.
    """
    read: list[State] = []
    best = on_main(run.engine, partial(_check, best, read))
    if best is None or best.judged_by is None:
        return ""
    saved = with_frozen(share_state(run.engine, best.path, next(iter(read), None)), run.modules)
    context = run
    optimizers = context.optimizers if extent == "everything" else {}
    load_parts(context, saved, optimizers, best.path)
    for name, scheduler in context.schedulers.items() if extent == "everything" else ():
        load_scheduler(name, scheduler, saved)
    average = measured_average(saved) if monitor.split == "validation" else None
    if average is not None:
        load_average(run.modules, saved, average)
    of = extent if average is None else f"{extent} averaged by {average!r}"
    return f"loaded back at the end: {of} of the best checkpoint {best.path}, {monitor.name} {best.judged_by[2]:.6g}"


def _check(best: storage.Entry | None, read: list[State]) -> storage.Entry | None:
    """Return the checkpoint where it is one to load, and add its state to what was read."""
    value = None if best is None or best.judged_by is None else best.judged_by[2]
    if best is None or value is None or isnan(value):
        return None
    state = storage.load(best.path)
    now = storage.read_manifest(best.path)
    if (now.sha256, now.judged_by) != (best.sha256, best.judged_by):
        raise ValueError(
            f"{best.path} is not the checkpoint that was ranked best by {best.judged_by}: another was put in its "
            f"place, judged by {now.judged_by}. Nothing was loaded."
        )
    read.append(state)
    return best
