"""A program beside the one that wrote a checkpoint: what must be the same, and what a difference costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ....events import Run
from ....events.guarantee import Guarantee
from ..unseen.program import affects_training
from .global_batch import difference, layout


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
