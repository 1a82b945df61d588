"""What a saved state holds: its version, plain types, and facts of the program that wrote it."""

from __future__ import annotations

import platform
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ...events.checks import PLAIN
from ..engines.options import parameters_of
from ..system.extras import version

if TYPE_CHECKING:
    from ...events import Run

SCHEMA = 4
State = dict[str, Any]


def versions() -> dict[str, str]:
    return {"heliograph": version(), **_SOFTWARE}


_SOFTWARE = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": str(np.__version__)}


WEIGHTS_ONLY = "weights_only"  # in a state that no run can resume
MAPPINGS = (dict, OrderedDict, Counter)
SEQUENCES = (list, tuple)
CONTAINERS = (*MAPPINGS, *SEQUENCES)
DEPTH = 100
FEW = 1_000_000  # items, which may be shared any number of times
EMPTY = b""  # one object; `torch.load(weights_only=True)` cannot read it, so it is saved as text with its type


def is_small_and_plain(value: Any) -> bool:
    # fast for most states: a walk of few items that tracks no paths
    level, seen = [value], 0
    for _ in range(DEPTH):
        keys, items = list[Any](), list[Any]()
        for container in level:
            if type(container) in MAPPINGS:
                keys += container
                items += container.values()
            elif type(container) in SEQUENCES:
                items += [item for item in container if type(item) not in PLAIN or item is EMPTY]
            elif not isinstance(container, Tensor):
                return False
            if len(items) > FEW:
                return False
        if not PLAIN.issuperset(map(type, keys)) or EMPTY in keys:
            return False
        level = [item for item in items if type(item) not in PLAIN or item is EMPTY]
        seen += len(level)
        if not level or seen > FEW:
            return not level
    return False


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    # rebuilds nested dicts, lists and tuples with each other value changed
    if type(value) in MAPPINGS:
        return type(value)({key: map_leaves(item, change) for key, item in value.items()})
    if type(value) in SEQUENCES:
        return type(value)([map_leaves(item, change) for item in value])
    return change(value)


def class_names(parts: Mapping[str, Any]) -> dict[str, str]:
    return {name: type(part).__name__ for name, part in parts.items()}


BatchChange = Literal["refuse", "keep", "linear", "sqrt"]
CHANGES: tuple[str, ...] = get_args(BatchChange)


def batch_factors(run: Run) -> dict[str, int | None]:
    # the batch size is 1 if whole batches are dealt to the ranks, and None if unknown
    return {"size": run.engine.world_size, "batch_size": run.data.batch_size, "accumulation": _accumulation(run)}


def global_batch(world: Mapping[str, int | None]) -> int | None:
    # in samples, or in batches if whole batches are dealt to the ranks
    batch_size, accumulation = world.get("batch_size"), world.get("accumulation")
    if batch_size is None or accumulation is None:
        return None
    return (world["size"] or 1) * batch_size * accumulation


def base_rates(optimizers: Mapping[str, Any]) -> list[float]:
    # before a scheduler changes them
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    return [float(group.get("initial_lr", group.get("lr", 0.0))) for group in groups]


def _accumulation(run: Run) -> int | None:
    # None if the number of micro-batches in a step is unknown
    for plugin in run.plugins:
        if "accumulation" in getattr(plugin, "exclusive", ()) and run.plugins.is_enabled(plugin):
            number = getattr(plugin, "number", None)
            return None if number is None else int(number(run.progress.epoch))
    return 1


Names = list[list[str | None]]  # by group; None for a parameter outside the modules of the task


def describe_groups(run: Run) -> dict[str, Any]:
    # parameter names by group, and which groups share a function of `LambdaLR`
    named = {id(parameter): name for name, parameter in parameters_by_name(run.modules).items()}
    return {
        "parameters": {name: group_names(optimizer, named) for name, optimizer in run.optimizers.items()},
        "functions": {
            name: [_index(function, functions) for function in functions]
            for name, scheduler in run.schedulers.items()
            if (functions := getattr(scheduler, "lr_lambdas", None))
        },
    }


def parameters_by_name(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{root}.{name}": value for root, module in modules.items() for name, value in parameters_of(module)}


def group_names(optimizer: torch.optim.Optimizer, named: Mapping[int, str]) -> Names:
    return [[named.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]


def _index(item: Any, items: list[Any]) -> int:
    return next(index for index, candidate in enumerate(items) if candidate is item)
