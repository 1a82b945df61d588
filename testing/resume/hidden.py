"""State that no checkpoint holds: attributes of the user's own objects that a resumed run does not have again."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

import numpy as np
import torch
from heliograph.core.repeated.suspects import is_own
from heliograph.events import Run
from heliograph.plugins import Plugins
from heliograph.testing.resume.facts import Leaves, leaves
from torch import Tensor, nn

SIMPLE = (bool, int, float, complex, str, NoneType, np.generic)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
CONTAINERS = (list, tuple, dict, set, deque)
LARGE = 1000
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def attributes(run: Run, plugins: Plugins) -> Leaves:
    """Return the simple attributes of the task, its modules, the plugins, dataset and sampler, by where they are."""
    return {
        f"{owner}.{name}{path and '.' * path[0].isalpha() + path}": leaf
        for owner, thing in _owners(run, plugins)
        for name, value in getattr(thing, "__dict__", {}).items()
        if name not in OF_EVERY_MODULE and _is_simple(value)
        for path, leaf in leaves(value).items()
    }


def changed(before: Leaves, after: Leaves) -> list[str]:
    """Return a phrase for each attribute that a resumed run does not have as the uninterrupted one had it."""
    return [
        f"{path} (was {_shown(before, path)}, is {_shown(after, path)})"
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    ]


def _owners(run: Run, plugins: Plugins) -> Iterator[tuple[str, Any]]:
    yield "task", run.task
    for root, module in run.modules.items():
        for name, part in module.named_modules():
            yield f"task.{root}{name and '.'}{name}", part
    for name in plugins.names():
        if not type(plugins[name]).__module__.startswith("heliograph."):  # the conformance suite looks after those
            yield f"plugin {name}", plugins[name]
    for name in ("dataset", "sampler", "batch_sampler"):
        thing = getattr(run.train_loader, name, None)
        if name == "dataset" or is_own(thing):
            yield name.replace("_", " "), thing


def _is_simple(value: Any) -> bool:
    if isinstance(value, CONTAINERS):
        items = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
        return len(value) <= LARGE and all(isinstance(each, SIMPLE) for each in items)
    if isinstance(value, Tensor):
        return value.numel() <= LARGE
    return isinstance(value, (*SIMPLE, *GENERATORS))


def _shown(values: Leaves, path: str) -> str:
    leaf = values.get(path)
    if leaf is None:
        return "not there"
    return leaf.kind if isinstance(leaf.glimpse, np.ndarray) else repr(leaf.glimpse)[:60]
