"""Run state outside of any `state_dict`: saved with each checkpoint, restored and compared at a resume."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from ...events import PluginName
from ...events.checks import describe as describe_function
from ...plugins.plugin import marked_methods
from ..data.users_code import is_by_user, is_ours, is_users
from ..system.plain_pickle import pack
from .graph import LISTENERS, Comparison, Graph, Namespace, Roots, capture_graph, untracked, user_hooks
from .program import (
    Value,
    affects_training,
    describe_program,
    differing,
    encode_data,
    encode_options,
    encode_scheduler_options,
)

if TYPE_CHECKING:
    from ...events import Run

logger = logging.getLogger("heliograph")
MODULE: Final = "module "
SET_BY_TORCH: Final = ("TORCH", "TRITON")  # environment variables of `torch.compile`
# The names of modules have no dots.
OPTIMIZER: Final = "run.optimizers."
SCHEDULER: Final = "run.schedulers."
_SGD: Final = frozenset({*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), "_opt_called", "step"})
_SCHEDULER: Final = frozenset({"optimizer", "_get_lr_called_within_step", "_is_initial", "_schedulers"})
FUNCTIONS: Final = frozenset({"lr_lambda", "lr_lambdas"})  # a scheduler's `state_dict` holds no closures
DATA_PARTS: Final = ("dataset", "sampler", "batch_sampler", "loaders", "datasets")
OPTIMIZER_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(slots=True)
class ObjectState:
    """Run state outside of any `state_dict`.

    Attributes:
        baseline: the objects at the start of the training.
        packed: the same, to skip the comparison if nothing has changed.
        data: the data objects then.
        options: the options of the optimizers and schedulers, as the program made them.
        environment: the environment variables at the start of the training. They may hold secrets, so none is saved.
        changed: the paths that the training has changed, including the runs before a resume.
        variables: the environment variables that it has changed.
    """

    baseline: Graph
    packed: bytes
    data: dict[str, Value]
    options: dict[str, Value]
    environment: dict[str, str]
    changed: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, run: Run) -> ObjectState:
        baseline = capture_baseline(run)
        return cls(baseline, baseline.pack(), encode_data(run), encode_options(run), dict(os.environ))

    def state_dict(self, run: Run) -> dict[str, Any]:
        """Return the objects, the paths that the training has changed, the data objects and the program."""
        graph = capture_graph(find_roots(run), self.changed)
        packed, needed = graph.pack(), set[int]()
        if self.changed or packed != self.packed:
            difference = Comparison(self.baseline, graph, self.changed)
            self.changed |= difference.paths
            needed = difference.needed
        for path, kind in untracked(graph, self.changed).items():
            run.data.report_untracked(path, kind)
        self.report_variables(run, {name for name, _ in self.environment.items() ^ os.environ.items()})
        data = encode_data(run)
        for path, value in data.items():
            if "unseen" in value:
                run.data.report_untracked(path, value["unseen"])
        facts = {
            "changed": sorted(self.changed),
            "variables": sorted(self.variables),
            "data": data,
            "data_changed": sorted({path for path, *_ in differing(self.data, data)}),
            "rates": learning_rates(run),
            "options": self.options,
            **describe_program(run),
        }
        return {"graph": packed, "contents": graph.plain_contents(needed), "facts": pack(facts)}

    def report_variables(self, run: Run, names: Iterable[str]) -> None:
        self.variables |= {name for name in names if not name.startswith(SET_BY_TORCH)}
        for name in sorted(self.variables):
            run.data.report_untracked(f"os.environ[{name!r}]", "changed by the training")

    def update_schedulers(self, run: Run) -> None:
        self.options |= encode_scheduler_options(run)


def learning_rates(run: Run) -> list[float]:
    return [float(group["lr"]) for optimizer in run.optimizers.values() for group in optimizer.param_groups]


def capture_baseline(run: Run) -> Graph:
    graph = capture_graph(find_roots(run))
    graph.contents.clear()  # the digests suffice, and the live tensors change
    return graph


def find_roots(run: Run) -> Roots:
    objects: dict[str, object] = dict(run.modules)  # first: an alias gets the first path that reaches it
    saved = dict(objects)
    for kind, parts, skipped in ((OPTIMIZER, run.optimizers, _SGD), (SCHEDULER, run.schedulers, _SCHEDULER)):
        for name, part in parts.items():
            saved[kind + name] = part
            objects[kind + name] = _unsaved_attributes(part, skipped)
    for name, plugin in zip(run.plugins.names(), run.plugins, strict=True):
        if not is_ours(type(plugin).__module__) and affects_training(plugin):
            objects[f"plugins.{name}"] = plugin
        else:
            saved[f"plugins.{name}"] = plugin
    objects[LISTENERS[:-1]] = Namespace(_connected_functions(run))
    if not isinstance(run.task, nn.Module):
        objects["run.task" if "task" in run.modules else "task"] = run.task
    objects |= {MODULE + name: Namespace(vars(module)) for name, module in user_modules().items()}
    owned = {
        id(parameter)
        for optimizer in run.optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return Roots(objects, saved, tuple(_data_objects(run)), frozenset(owned), run.phase == "train")


def _unsaved_attributes(part: Any, skipped: frozenset[str]) -> Namespace:
    # of torch's optimizers and schedulers only the user's functions
    if type(part).__module__.startswith("torch."):
        names = FUNCTIONS & vars(part).keys()
    else:
        names = vars(part).keys() - skipped - (part.state_dict().keys() - FUNCTIONS) - set(OPTIMIZER_HOOKS)
    return Namespace(
        {name: item for name, item in vars(part).items() if name in names and name[:2] != "__"}
        | dict(user_hooks(part, OPTIMIZER_HOOKS))
    )


def _connected_functions(run: Run) -> dict[str, Any]:
    plugins = dict(zip(run.plugins.names(), run.plugins, strict=True))
    ours = {id(plugin) for plugin in run.plugins if is_ours(type(plugin).__module__)}
    functions: dict[str, Any] = {}
    for signal in run.bus.signals():
        for receiver, subscription in signal.listeners():
            if id(getattr(receiver, "__self__", None)) in ours:  # nearly always
                continue
            plugin = plugins.get(subscription.owner)  # a function connected in a handler has the plugin as owner, too
            if not _is_users(receiver) or (plugin is not None and not affects_training(plugin)):
                continue
            handlers = [getattr(plugin, name) for name, _ in marked_methods(type(plugin))]
            if isinstance(subscription.owner, PluginName) and (plugin is None or receiver in handlers):
                continue
            name = f"{signal.event.__name__}.{describe_function(receiver)}"
            while name in functions:
                name += "'"
            functions[name] = receiver
    return functions


def _is_users(receiver: Any) -> bool:
    while isinstance(receiver, partial):
        receiver = receiver.func
    holder = getattr(receiver, "__self__", receiver)
    return is_by_user(holder if isinstance(holder, type | types.FunctionType) else type(holder))


def _data_objects(run: Run) -> Iterator[object]:
    loaders = [run.data.train_loader, *run.data.validation_loaders.values()]
    yield from loaders
    pending = [getattr(loader, name, None) for loader in loaders for name in DATA_PARTS]
    while pending:
        part = pending.pop()
        yield part
        values = part.values() if isinstance(part, dict) else getattr(part, "__dict__", {}).values()
        for value in list(values)[:100]:
            yield value
            if isinstance(value, tuple):  # of a TensorDataset
                yield from value[:100]
        if (inner := getattr(part, "dataset", None)) is not None:
            pending.append(inner)
        pending += list(getattr(part, "datasets", ()))[:100]


def user_modules() -> dict[str, types.ModuleType]:
    # neither Python's, nor installed, nor heliograph's
    return _user_modules(len(sys.modules), next(reversed(sys.modules)))


@lru_cache(maxsize=1)
def _user_modules(count: int, last: str) -> dict[str, types.ModuleType]:  # noqa: ARG001  # the same until an import
    return {
        name: module
        for name, module in list(sys.modules.items())
        if type(module) is types.ModuleType
        and module.__name__ == name
        and (isinstance(getattr(module, "__file__", None), str) or name == "__main__")
        and is_users(name)
    }
