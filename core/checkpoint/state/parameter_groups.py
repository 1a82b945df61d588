"""The parameter groups of optimizers: saved by the names of their parameters, and restored if a run added some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ....events import Run

Names = list[list[str | None]]  # by group; None for a parameter that no module of the task has


def describe_groups(run: Run) -> dict[str, Any]:
    """Return what is saved of the groups: the names of their parameters, and which share a function of `LambdaLR`."""
    named = {id(each): name for name, each in _parameters(run.modules).items()}
    return {
        "parameters": {name: _names(each, named) for name, each in run.optimizers.items()},
        "functions": {
            name: [_index(each, functions) for each in functions]
            for name, scheduler in run.schedulers.items()
            if (functions := getattr(scheduler, "lr_lambdas", None))
        },
    }


def restore_groups(
    run: Run, saved: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer], *, drops_added: bool
) -> None:
    """Give optimizers the parameter groups that they had when a snapshot was taken.

    Args:
        run: the run.
        saved: the snapshot.
        optimizers: by name.
        drops_added: whether groups that the run has added since may be removed.

    Raises:
        ValueError: the parameters of the saved groups are unknown, or the program has some that were in no group.
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
        change = f"{_describe_sizes(sizes)}, the program's has {_describe_sizes(map(len, now))}"
        added = _all(now) - _all(then) if is_known and not drops_added else set()
        if not is_known or added:
            raise ValueError(_refusal(name, change, then, added))
        _regroup(optimizer, groups, [[parameters[key] for key in each] for each in then])
        run.note(f"the {name!r} continues with the checkpoint's {change}")


def load_scheduler(name: str, scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Load a scheduler's state from a snapshot, after the optimizer's groups were restored.

    Raises:
        ValueError: a group had a function of its own that the program's scheduler does not have.
    """
    state = deepcopy(saved["schedulers"][name])
    functions: list[Any] = getattr(scheduler, "lr_lambdas", [])
    count = len(state.get("lr_lambdas", functions))
    del functions[count:]
    for index in saved.get("groups", {}).get("functions", {}).get(name, [])[len(functions) : count]:
        if index < len(functions):
            functions.append(functions[index])
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


def _index(one: Any, of: list[Any]) -> int:
    """Return the index of the first item that is the same object."""
    return next(index for index, each in enumerate(of) if each is one)


def _all(names: Names) -> set[str]:
    return {str(name) for each in names for name in each}


def _refusal(name: str, change: str, then: Names | None, added: set[str]) -> str:
    """Return why the groups cannot be restored, and what to do."""
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


def _describe_sizes(sizes: Iterable[int]) -> str:
    counts = list(map(str, sizes))
    return f"{len(counts)} parameter group{'s' * (len(counts) != 1)} of {' and '.join(counts)} parameters"


def _regroup(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], parameters: list[list[nn.Parameter]]
) -> None:
    """Set the parameters of an optimizer's groups; their options are loaded afterwards."""
    del optimizer.param_groups[len(groups) :]
    for group, held in zip(optimizer.param_groups, parameters, strict=False):
        group["params"] = held
    for group, held in list(zip(groups, parameters, strict=True))[len(optimizer.param_groups) :]:
        options = {key: deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        named = list(zip(group["param_names"], held, strict=True)) if "param_names" in group else held
        optimizer.add_param_group({"params": named, **options})
