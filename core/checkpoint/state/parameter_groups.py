"""The parameter groups of optimizers: saved by the names of their parameters, and made again where a run added some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ....events import Run
from ....events.guarantee import Guarantee
from ..unseen.variables import affects_training
from .global_batch import difference, layout

Names = list[list[str | None]]  # of each group; None for a parameter that is of no module of the task


def groups_of(run: Run) -> dict[str, Any]:
    """Return what is saved of the groups: the names of their parameters, and which share a scheduler's function."""
    named = {id(each): name for name, each in _parameters(run.modules).items()}
    return {
        "parameters": {name: _names(each, named) for name, each in run.optimizers.items()},
        "functions": {
            name: [_place(each, functions) for each in functions]
            for name, scheduler in run.schedulers.items()
            if (functions := getattr(scheduler, "lr_lambdas", None))
        },
    }


def settle_groups(
    run: Run, saved: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer], *, drops_added: bool
) -> None:
    """Give optimizers the groups that they had when a cut was taken.

    Args:
        run: the run.
        saved: the cut.
        optimizers: by name.
        drops_added: whether groups may go that the run has added since.

    Raises:
        ValueError: nobody knows which parameters were in them, or the program's have some that were in none.
    """
    parameters = _parameters(run.modules)
    named = {id(each): name for name, each in parameters.items()}
    for name, optimizer in optimizers.items():
        groups = (saved["optimizers"] or saved["shards"]["optimizers"])[name]["param_groups"]
        now, then = _names(optimizer, named), saved.get("groups", {}).get("parameters", {}).get(name)
        sizes = [len(each["params"]) for each in groups]
        is_known = then is not None and all(key in parameters for each in then for key in each)
        if then == now or (not is_known and sizes == list(map(len, now))):
            continue
        change = f"{_told(sizes)}, the program's has {_told(map(len, now))}"
        added = _all(now) - _all(then) if is_known and not drops_added else set()
        if not is_known or added:
            raise ValueError(_refusal(name, change, then, added))
        _regroup(optimizer, groups, [[parameters[key] for key in each] for each in then])
        run.note(f"the {name!r} continues with the checkpoint's {change}")


def load_scheduler(name: str, scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Load a scheduler's state from a cut, whose groups the optimizer has again.

    Raises:
        ValueError: a group had a function of its own that the program's scheduler does not have.
    """
    state = deepcopy(saved["schedulers"][name])
    functions: list[Any] = getattr(scheduler, "lr_lambdas", [])
    count = len(state.get("lr_lambdas", functions))
    del functions[count:]
    for place in saved.get("groups", {}).get("functions", {}).get(name, [])[len(functions) : count]:
        if place < len(functions):
            functions.append(functions[place])
    if len(functions) < count:
        raise ValueError(
            f"The scheduler {type(scheduler).__name__} had functions for {count} parameter groups, the program gives "
            f"it {len(functions)}, and functions are not saved. A group that is added in a run can be resumed where it "
            f"has the function of another group: scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])."
        )
    scheduler.load_state_dict(state)


def _parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    named = ((f"{root}.{name}", each) for root, module in modules.items() for name, each in module.named_parameters())
    return dict(named)


def _names(optimizer: torch.optim.Optimizer, named: Mapping[int, str]) -> Names:
    return [[named.get(id(each)) for each in group["params"]] for group in optimizer.param_groups]


def _place(one: Any, of: list[Any]) -> int:
    """Return the place of the first object that is this very one."""
    return next(place for place, each in enumerate(of) if each is one)


def _all(names: Names) -> set[str]:
    return {str(name) for each in names for name in each}


def _refusal(name: str, change: str, then: Names | None, added: set[str]) -> str:
    """Return why groups cannot be made what they were."""
    if then is None:
        why = "it was written by a version that did not save which parameters they held"
    elif added:
        why = f"they did not hold {', '.join(sorted(added)[:5])}"
    else:
        why = "they held parameters that are in no module of the task"
    return (
        f"The {name!r} of the checkpoint has {change}, and {why}. Give fit an optimizer with the checkpoint's groups, "
        f"and add others by optimizer.add_param_group() at CheckpointLoaded; or load only the weights, with "
        f"load_weights."
    )


def _told(sizes: Iterable[int]) -> str:
    counts = list(map(str, sizes))
    return f"{len(counts)} parameter group{'s' * (len(counts) != 1)} of {' and '.join(counts)} parameters"


def _regroup(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], parameters: list[list[nn.Parameter]]
) -> None:
    """Make the groups of an optimizer hold other parameters; what else they hold is loaded after that."""
    del optimizer.param_groups[len(groups) :]
    for group, held in zip(optimizer.param_groups, parameters, strict=False):
        group["params"] = held
    for group, held in list(zip(groups, parameters, strict=True))[len(optimizer.param_groups) :]:
        options = {key: deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        named = list(zip(group["param_names"], held, strict=True)) if "param_names" in group else held
        optimizer.add_param_group({"params": named, **options})


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
