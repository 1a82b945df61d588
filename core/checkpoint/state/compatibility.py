"""A program beside the one that wrote a checkpoint: what must be the same, and what a difference costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import sqrt
from typing import Any, Literal, get_args

from torch import Tensor

from ....events import Run
from ....events.guarantee import Guarantee
from ..unseen.program import affects_training


def kinds(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the classes of optimizers or schedulers."""
    return {name: type(part).__name__ for name, part in parts.items()}


def scheduler_kinds(run: Run, saved: Mapping[str, Any]) -> dict[str, str]:
    """Return the kinds of the saved schedulers; Helios kept none, so one is taken for what it is given to."""
    known, now = saved.get("scheduler_kinds", {}), kinds(run.schedulers)
    return {name: known.get(name) or now.get(name, "unknown") for name in saved["schedulers"]}


def check_optimizers(run: Run, saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless the saved optimizers are those of the run, by name and kind."""
    now, known = kinds(run.optimizers), saved.get("optimizer_kinds", {})
    before = {name: known.get(name) or now.get(name, "unknown") for name in saved["optimizers"]}
    if before.keys() != now.keys():
        raise ValueError(
            f"The checkpoint holds the optimizers {sorted(before)}, the run has {sorted(now)}: call them the same in "
            f"fit(optimizer={{...}}), or load only the weights, with load_weights."
        )
    for name, kind in now.items():
        if before[name] != kind:
            raise ValueError(
                f"The checkpoint was written with {before[name]}, the optimizer now is {kind}: resume with the former, "
                f"or load only the weights, with load_weights."
            )


def changes(
    run: Run, saved: Mapping[str, Any], versions: Mapping[str, str], fresh_plugins: Iterable[str]
) -> Iterator[tuple[Guarantee, str]]:
    """Yield what of the program is other than it was, so that the run will not equal the uninterrupted one.

    Args:
        run: the run, with its state loaded.
        saved: what it goes on from.
        versions: of the software that runs now.
        fresh_plugins: those that found no state in the cut.
    """
    plugins_then = saved.get("unseen", {}).get("plugins")  # one that was not there is named as new
    for name in fresh_plugins:
        if affects_training(run.plugins[name]) and (plugins_then is None or name in plugins_then):
            yield "not exact", f"plugin {name!r} found no state in the checkpoint"
    before, now = scheduler_kinds(run, saved), kinds(run.schedulers)
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            yield "not exact", f"the scheduler was {before.get(name, 'none')} and is {now.get(name, 'none')}"
    if (change := difference(saved["world"], layout(run))) is not None:
        yield "not exact", change
    yield from _other_ranks(run, saved, same_steps=change is None)
    for software, version in versions.items():
        if (version_then := saved["versions"].get(software, version)) != version:
            yield "not exact", f"the checkpoint was written with {software} {version_then}, this is {version}"


def _other_ranks(run: Run, saved: Mapping[str, Any], *, same_steps: bool) -> Iterator[tuple[Guarantee, str]]:
    """Yield what a changed number of ranks costs, even where every step is made of as many samples of one order."""
    before, now = saved["world"]["size"], run.engine.world_size
    if before == now:
        return
    placed = saved["data"].get("layout")
    same_order = placed is not None and placed["common"]
    level: Guarantee = "order-exact" if same_steps and same_order else "not exact"
    yield level, f"{before} processes wrote the checkpoint, {now} resumed it: gradients are summed in another order"
    if now < before:
        yield level, f"the random generators of {_ranks(now, before)} are gone with them"
    else:
        yield level, f"{_ranks(before, now)} had no state of their own: random generators begin anew there"


def _ranks(first: int, end: int) -> str:
    return f"rank {first}" if end == first + 1 else f"ranks {first} to {end - 1}"


BatchChange = Literal["refuse", "keep", "linear", "sqrt"]
CHANGES: tuple[str, ...] = get_args(BatchChange)
RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # in the groups of an optimizer
LISTS = ("base_lrs", "max_lrs", "_last_lr")  # of a scheduler


def layout(run: Run) -> dict[str, int | None]:
    """Return what the global batch is made of: `size` ranks, `batch_size` of each, `accumulation` of batches.

    The batch size counts samples; where batches are dealt out to the ranks as they are, it is 1. It is None where
    nobody knows it.
    """
    return {"size": run.engine.world_size, "batch_size": run.data.batch_size, "accumulation": _accumulation(run)}


def global_batch(world: Mapping[str, int | None]) -> int | None:
    """Return how many samples (or batches, where these are dealt out) make one step, None where nobody knows."""
    batch_size, accumulation = world.get("batch_size"), world.get("accumulation")
    if batch_size is None or accumulation is None:
        return None
    return (world["size"] or 1) * batch_size * accumulation


def difference(before: Mapping[str, int | None], now: Mapping[str, int | None]) -> str | None:
    """Return what became of the global batch, None where it is the same; of one unknown, what is known is compared."""
    then, here = global_batch(before), global_batch(now)
    if then is None or here is None:
        known = [name for name in now if None not in (before.get(name), now[name])]
        differs = any(before[name] != now[name] for name in known)
    else:
        differs = then != here
    return f"the global batch was {_told(before)}, and is {_told(now)}" if differs else None


def settle_change(run: Run, before: Mapping[str, int | None], how: BatchChange, *, may_refuse: bool) -> str | None:
    """Scale the learning rates of a resumed run by what became of its global batch, or refuse that it changed.

    Return in what it changed, None where it did not.

    Without a word on it, a change is refused, but not of one process that goes on from one, whose batch size or
    accumulation somebody changed: the result notes it. Where nobody knows the batch size, nothing is refused or scaled.

    Args:
        run: the run, with its position, optimizers and schedulers as they were saved.
        before: the layout of the run that wrote the checkpoint.
        how: what to do about a change.
        may_refuse: whether the run is resumed; a return to a state of its own is never refused.

    Raises:
        ValueError: the global batch changed, on several ranks before or now, and nobody said how.
    """
    now = layout(run)
    change = difference(before, now)
    if change is None:
        return None
    then, here = global_batch(before), global_batch(now)
    factor = 1.0
    if then is not None and here is not None:
        if how == "refuse" and may_refuse and (before["size"], now["size"]) != (1, 1):
            raise ValueError(
                f"The global batch changed: {_told(before)} made one optimizer step when the checkpoint was written, "
                f"{_told(now)} would now. Keep the product by another batch_size or GradientAccumulation, or say what "
                f"becomes of the learning rate: Checkpoint(..., batch_change='keep'), 'linear' or 'sqrt'."
            )
        factor = {"linear": here / then, "sqrt": sqrt(here / then)}.get(how, 1.0)
    if factor == 1.0:
        run.note(f"{change}: learning rates as they were saved")
        return change
    for optimizer in run.optimizers.values():
        scale_optimizer(optimizer, factor)
    for scheduler in run.schedulers.values():
        scale_scheduler(scheduler, factor)
    run.note(f"{change}: learning rates times {factor:.6g} ({how})")
    return change


def scale_optimizer(optimizer: Any, factor: float) -> None:
    """Multiply the learning rates of an optimizer."""
    for group in optimizer.param_groups:
        for name in RATES:
            if name in group:
                group[name] = _scaled(group[name], factor)


def scale_scheduler(scheduler: Any, factor: float) -> None:
    """Multiply the learning rates that a scheduler computes from, and those of the schedulers in it."""
    for name in LISTS:
        if isinstance(rates := getattr(scheduler, name, None), list):
            setattr(scheduler, name, [_scaled(rate, factor) for rate in rates])
    for inner in getattr(scheduler, "_schedulers", ()):
        scale_scheduler(inner, factor)


def _scaled(rate: Any, factor: float) -> Any:
    return rate.mul_(factor) if isinstance(rate, Tensor) else rate * factor


def _accumulation(run: Run) -> int | None:
    """Return how many micro-batches make a step, as the plugin that claims `accumulation` tells, if it does."""
    for plugin in run.plugins:
        if "accumulation" in getattr(plugin, "exclusive", ()) and run.plugins.is_enabled(plugin):
            number = getattr(plugin, "number", None)
            return None if number is None else int(number(run.progress.epoch))
    return 1


def _told(world: Mapping[str, int | None]) -> str:
    ranks = "1 rank" if world["size"] == 1 else f"{world['size']} ranks"
    batch_size, accumulation = ("unknown" if world.get(n) is None else world[n] for n in ("batch_size", "accumulation"))
    return f"{ranks} x batch_size {batch_size} x accumulation {accumulation}"
