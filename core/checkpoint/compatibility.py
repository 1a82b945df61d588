"""Compare the resuming program with the saving one: optimizers, groups, ranks, batch size, rates, frozen weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ...events import Run
from ..engines.contract import Modules, Optimizers
from ..engines.options import parameters_of
from ..objects.program import affects_training
from .ranks import digest
from .schema import BatchChange, Names, batch_factors, class_names, global_batch, group_names, parameters_by_name


def saved_scheduler_classes(run: Run, saved: Mapping[str, Any]) -> dict[str, str]:
    # Helios saved no classes, so the run's are assumed
    saved_classes, now = saved.get("scheduler_kinds", {}), class_names(run.schedulers)
    return {name: saved_classes.get(name) or now.get(name, "unknown") for name in saved["schedulers"]}


def check_optimizers(run: Run, saved: Mapping[str, Any]) -> None:
    now, saved_classes = class_names(run.optimizers), saved.get("optimizer_kinds", {})
    before = {name: saved_classes.get(name) or now.get(name, "unknown") for name in saved["optimizers"]}
    if before.keys() != now.keys():
        raise ValueError(
            f"The checkpoint holds the optimizers {sorted(before)}, the run has {sorted(now)}: use the same names in "
            f"fit(optimizer={{...}}), or load only the weights, with load_weights."
        )
    for name, kind in now.items():
        if before[name] != kind:
            raise ValueError(
                f"The checkpoint was written with {before[name]}, the optimizer now is {kind}: resume with "
                f"{before[name]}, or load only the weights, with load_weights."
            )


def find_differences(
    run: Run, saved: Mapping[str, Any], versions: Mapping[str, str], fresh_plugins: Iterable[str]
) -> Iterator[str]:
    """Yield a sentence for each difference between the saving and the resuming program.

    Args:
        run: the run, with its state loaded.
        saved: the snapshot from which it continues.
        versions: the present versions of the software.
        fresh_plugins: the plugins that have no state in the snapshot.
    """
    plugins_then = saved.get("unseen", {}).get("plugins")  # a new plugin is reported separately
    for name in fresh_plugins:
        if affects_training(run.plugins[name]) and (plugins_then is None or name in plugins_then):
            yield f"plugin {name!r} has no state in the checkpoint"
    before, now = saved_scheduler_classes(run, saved), class_names(run.schedulers)
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            yield f"the scheduler was {before.get(name, 'none')} and is {now.get(name, 'none')}"
    if (change := describe_batch_change(saved["world"], batch_factors(run))) is not None:
        yield change
    yield from _rank_differences(run, saved)
    for software, version in versions.items():
        if (version_then := saved["versions"].get(software, version)) != version:
            yield f"the checkpoint was written with {software} {version_then}, this is {version}"


def _rank_differences(run: Run, saved: Mapping[str, Any]) -> Iterator[str]:
    before, now = saved["world"]["size"], run.engine.world_size
    if before == now:
        return
    yield f"{before} processes wrote the checkpoint, {now} resumed it: gradients are summed in another order"
    if now < before:
        yield f"the random generators of {_ranks(now, before)} are dropped"
    else:
        yield f"{_ranks(before, now)} had no saved state: random generators start fresh there"


def _ranks(first: int, end: int) -> str:
    return f"rank {first}" if end == first + 1 else f"ranks {first} to {end - 1}"


def describe_batch_change(before: Mapping[str, int | None], now: Mapping[str, int | None]) -> str | None:
    # if a global batch is unknown, its known factors are compared
    previous, present = global_batch(before), global_batch(now)
    if previous is None or present is None:
        known_factors = [name for name in now if None not in (before.get(name), now[name])]
        differs = any(before[name] != now[name] for name in known_factors)
    else:
        differs = previous != present
    return f"the global batch was {_describe_batch(before)}, and is {_describe_batch(now)}" if differs else None


def apply_batch_change(run: Run, before: Mapping[str, int | None], how: BatchChange, *, may_refuse: bool) -> str | None:
    """Scale the learning rates of a resumed run to its global batch, or refuse a change of it.

    By default a change is refused if there were or are several ranks; with one process it is only noted. If the batch
    size is unknown, nothing is refused or scaled.

    Args:
        run: the run, with its saved position, optimizers and schedulers.
        before: the factors of the global batch in the run that wrote the checkpoint.
        how: the policy for a change.
        may_refuse: whether the run is resumed; a rollback to its own state is never refused.

    Returns:
        How the global batch changed; None if it did not.

    Raises:
        ValueError: the global batch changed, there were or are several ranks, and `how` is "refuse".
    """
    now = batch_factors(run)
    change = describe_batch_change(before, now)
    if change is None:
        return None
    previous, present = global_batch(before), global_batch(now)
    factor = 1.0
    if previous is not None and present is not None:
        if how == "refuse" and may_refuse and (before["size"], now["size"]) != (1, 1):
            raise ValueError(
                f"The global batch changed: {_describe_batch(before)} made one optimizer step when the checkpoint was "
                f"written, {_describe_batch(now)} would now. Keep the product with another batch_size or "
                f"GradientAccumulation, or choose the learning rate with "
                f"Checkpoint(..., resume=Resume(batch_change='keep')), 'linear' or 'sqrt'."
            )
        factor = {"linear": present / previous, "sqrt": sqrt(present / previous)}.get(how, 1.0)
    if factor == 1.0:
        run.note(f"{change}: saved learning rates kept")
        return change
    for optimizer in run.optimizers.values():
        scale_optimizer(optimizer, factor)
    for scheduler in run.schedulers.values():
        scale_scheduler(scheduler, factor)
    run.note(f"{change}: learning rates times {factor:.6g} ({how})")
    return change


RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # in the groups of an optimizer, some set by schedulers
LISTS = ("base_lrs", "max_lrs", "_last_lr")  # of a scheduler


def scale_optimizer(optimizer: Any, *factors: float) -> None:
    """Multiply the learning rates of an optimizer by one factor, or by one for each parameter group."""
    groups = optimizer.param_groups
    for group, factor in zip(groups, factors if len(factors) > 1 else factors * len(groups), strict=True):
        for name in RATES:
            if name in group and factor != 1.0:
                set_rate(group, name, group[name] * factor)


def set_rate(group: dict[str, Any], name: str, rate: Any) -> None:
    # a tensor stays the same object, since captured graphs refer to it
    present = group[name]
    group[name] = present.copy_(torch.as_tensor(rate)) if isinstance(present, Tensor) else rate


def scale_scheduler(scheduler: Any, factor: float) -> None:
    """Multiply the rates that a scheduler computes learning rates from, also in nested schedulers.

    The `min_lr` of a plateau scheduler does not change.
    """
    if hasattr(scheduler, "eta_min"):
        scheduler.eta_min *= factor
    for name in LISTS:
        if isinstance(rates := getattr(scheduler, name, None), list):
            setattr(scheduler, name, [rate * factor for rate in rates])
    for inner in getattr(scheduler, "_schedulers", ()):
        scale_scheduler(inner, factor)


def _describe_batch(world: Mapping[str, int | None]) -> str:
    ranks = "1 rank" if world["size"] == 1 else f"{world['size']} ranks"
    batch_size, accumulation = ("unknown" if world.get(n) is None else world[n] for n in ("batch_size", "accumulation"))
    return f"{ranks} x batch_size {batch_size} x accumulation {accumulation}"


def restore_groups(run: Run, saved: Mapping[str, Any], optimizers: Optimizers, *, drops_added: bool) -> None:
    """Give optimizers the parameter groups of a snapshot.

    Args:
        run: the run.
        saved: the snapshot.
        optimizers: by name.
        drops_added: whether groups that the run has added since may be removed.

    Raises:
        ValueError: the parameters of the saved groups are unknown, or the program has parameters that were in no group.
    """
    parameters = parameters_by_name(run.modules)
    named = {id(parameter): name for name, parameter in parameters.items()}
    for name, optimizer in optimizers.items():
        groups = (saved["optimizers"] or saved["shards"]["optimizers"])[name]["param_groups"]
        now, then = group_names(optimizer, named), saved.get("groups", {}).get("parameters", {}).get(name)
        sizes = [len(group["params"]) for group in groups]
        is_known = then is not None and all(key in parameters for names in then for key in names)
        if then == now or (not is_known and sizes == list(map(len, now))):
            continue
        change = f"{_describe_sizes(sizes)}, the program's has {_describe_sizes(map(len, now))}"
        added = _all(now) - _all(then) if is_known and not drops_added else set()
        if not is_known or added:
            raise ValueError(_explain_groups(name, change, then, added))
        _regroup(optimizer, groups, [[parameters[key] for key in names] for names in then])
        run.note(f"the {name!r} continues with the checkpoint's {change}")


def load_scheduler(name: str, scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Load a scheduler's state from a snapshot, after the optimizer's groups were restored.

    Raises:
        ValueError: a group had its own function, which the program's scheduler does not have.
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
            f"The scheduler {type(scheduler).__name__} had functions for {count} parameter groups, the program has "
            f"{len(functions)}, and functions are not saved. A group that is added during a run can be resumed if it "
            f"shares the function of another group: scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])."
        )
    scheduler.load_state_dict(state)


def _all(names: Names) -> set[str]:
    return {str(name) for group in names for name in group}


def _explain_groups(name: str, change: str, then: Names | None, added: set[str]) -> str:
    if then is None:
        reason = "their parameters are unknown"
    elif added:
        reason = f"they lack {', '.join(sorted(added)[:5])}"
    else:
        reason = "they have parameters that are in no module of the task"
    return (
        f"The {name!r} of the checkpoint has {change}, and {reason}. Give fit an optimizer with the checkpoint's "
        f"groups, and add further groups by optimizer.add_param_group() at CheckpointLoaded; or load only the weights, "
        f"with load_weights."
    )


def _describe_sizes(sizes: Iterable[int]) -> str:
    counts = list(map(str, sizes))
    return f"{len(counts)} parameter group{'s' * (len(counts) != 1)} of {' and '.join(counts)} parameters"


def _regroup(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], parameters: list[list[nn.Parameter]]
) -> None:
    # the options of the groups are loaded afterwards
    del optimizer.param_groups[len(groups) :]
    for group, group_parameters in zip(optimizer.param_groups, parameters, strict=False):
        group["params"] = group_parameters
    for group, group_parameters in list(zip(groups, parameters, strict=True))[len(optimizer.param_groups) :]:
        options = {key: deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        names = group.get("param_names")
        named = group_parameters if names is None else list(zip(names, group_parameters, strict=True))
        optimizer.add_param_group({"params": named, **options})


FROZEN = "frozen"  # in a state: the digests of the weights that it lacks, by module and name
Key = tuple[str, str]  # a module, a name in it


def with_frozen(saved: Mapping[str, Any], modules: Modules) -> Mapping[str, Any]:
    """Return a saved state with the frozen weights that it lacks, taken from the program.

    Raises:
        ValueError: the program has other weights, or lacks one.
    """
    if not saved.get(FROZEN):
        return saved
    weights = {
        root: {**saved_weights, **verified_weights(root, modules.get(root), saved[FROZEN].get(root, {}))}
        for root, saved_weights in saved["modules"].items()
    }
    return {**saved, "modules": weights}


def verified_weights(root: str, module: nn.Module | None, digests: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the parameters of a module that have these digests, by name.

    Raises:
        ValueError: one has another digest, or is missing.
    """
    parameters = {} if module is None else dict(parameters_of(module, remove_duplicate=False))
    if any(hasattr(parameters.get(name), "full_tensor") for name in digests):
        raise ValueError(
            "The checkpoint holds only trained weights (TrainedOnly), and this program shards its weights: read it "
            "with an engine that has full weights on each rank, such as DDPEngine."
        )
    mismatched = [
        name for name, value in digests.items() if name not in parameters or digest(parameters[name]).hex() != value
    ]
    if mismatched:
        raise ValueError(
            f"The checkpoint holds only trained weights (TrainedOnly), and the frozen weights of this program differ: "
            f"{len(mismatched)} of {len(digests)}, such as {root}.{mismatched[0]}. Load the same base weights before "
            f"fit, in the same dtype."
        )
    return {name: parameters[name].detach() for name in digests}


def named_parameters(modules: Modules) -> Iterator[tuple[Key, Tensor]]:
    for root, module in modules.items():
        for name, parameter in parameters_of(module, remove_duplicate=False):
            yield (root, name), parameter
