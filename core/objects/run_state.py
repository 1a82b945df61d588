"""Run state outside of any `state_dict`: saved with each checkpoint, restored and compared at a resume."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch import nn

from ...events import BatchEnd, EpochEnd, EpochStart, Handle, PluginName, Run
from ...events.checks import describe as describe_function
from ...plugins.plugin import marked_methods
from ..data.users_code import is_by_user, is_ours, is_users
from ..system.plain_pickle import pack, unpack
from .equality import sums
from .graph import LISTENERS, Comparison, Graph, Namespace, Roots, capture_graph, describe, untracked, user_hooks
from .program import (
    MISSING,
    Value,
    affects_training,
    compare_programs,
    describe_program,
    differing,
    encode_data,
    encode_options,
    encode_scheduler_options,
    show_both,
)
from .restore import restore

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
        saved: the facts in the checkpoint, until the first `EpochStart` is over.
        must_share: whether the ranks must exchange the differences that a resume has reported.
        waiting: reports the differences of the data that are compared again after the next batch.
    """

    baseline: Graph
    packed: bytes
    data: dict[str, Value]
    options: dict[str, Value]
    environment: dict[str, str]
    changed: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    saved: Mapping[str, Any] | None = None
    must_share: bool = False
    waiting: Callable[[], None] | None = None

    @classmethod
    def of(cls, run: Run) -> ObjectState:
        baseline = _baseline(run)
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
        self._report_variables(run, {name for name, _ in self.environment.items() ^ os.environ.items()})
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

    def _report_variables(self, run: Run, names: Iterable[str]) -> None:
        self.variables |= {name for name in names if not name.startswith(SET_BY_TORCH)}
        for name in sorted(self.variables):
            run.data.report_untracked(f"os.environ[{name!r}]", "changed by the training")

    def update_schedulers(self, run: Run) -> None:
        self.options |= encode_scheduler_options(run)

    def resume(self, run: Run, saved: Mapping[str, Any], *, is_roll_back: bool) -> tuple[list[str], list[str]]:
        """Restore the paths that the training had changed, and report remaining differences from the checkpoint.

        Args:
            run: the run, with its state loaded.
            saved: the result of `state_dict`.
            is_roll_back: whether the same process wrote the state. Plugins and module variables then stay unchanged, so
                that a plugin can count the rollbacks.

        Returns:
            The restored paths, and the paths that the program now sets differently.
        """
        facts = unpack(saved["facts"])
        self.changed |= set(facts["changed"])
        self._report_variables(run, facts["variables"])
        roots, graph = find_roots(run), Graph(**unpack(saved["graph"]), contents=saved["contents"])
        paths = {path for path in facts["changed"] if not (is_roll_back and path.startswith((MODULE, "plugins.")))}
        restored, failed = restore(roots, graph, paths)
        _write_back(run, roots)
        if is_roll_back:
            return restored, []
        present = capture_graph(find_roots(run))
        untracked_now = untracked(present, self.changed)
        for path, kind in untracked_now.items():
            run.data.report_untracked(path, kind)
        for path, kind in failed.items():
            if path not in untracked_now:  # a later resume finds no trace of it: differences are saved, too
                run.data.report_difference(f"{path} ({kind}) was not restored")
        edited = list[str]()
        for path in sorted(Comparison(graph, present).paths - failed.keys()):
            if path not in self.changed:
                edited.append(path)
            elif path not in graph.untracked and path not in present.untracked:
                was, now = describe(graph, path), describe(present, path)
                run.data.report_difference(f"{path} was {was} and is {now}")
        return restored, edited

    # runs once every plugin has its state: attributes that change later count as changes
    def compare(self, run: Run, saved: Mapping[str, Any], *, is_roll_back: bool) -> None:
        if not is_roll_back:
            facts = unpack(saved["facts"])
            for change in compare_programs(facts, describe_program(run)):
                run.data.report_difference(change)
            restored = encode_options(run)
            for option, was, now in differing(facts["options"], self.options):
                if MISSING not in (was, now) and restored.get(option) != now:
                    before, present = show_both(was, now)
                    note = f"{option} was {before} in the program and is {present}: the value in the checkpoint is used"
                    run.note(note)
                    logger.warning(note)
            self.saved = facts
        self.baseline, self.data = _baseline(run), encode_data(run)
        self.packed = self.baseline.pack()

    @contextmanager
    def comparing_start(self, run: Any) -> Iterator[None]:
        saved, self.saved = self.saved, None
        if saved is None:
            yield
        else:
            with run.evaluating_weights():  # as during the save
                before = (_baseline(run), _sums(run) if _handlers(run) else {}) if run.progress.batch else None
            yield
            if before is not None:
                with run.evaluating_weights():
                    _compare_start(run, saved, *before)
            run.hooks.when_positioned(partial(self._compare_data, run, saved))
        self._share(run)

    def compare_end(self, run: Any) -> None:
        # of a training that read no batch after it was resumed
        saved, self.saved = self.saved, None
        if saved is not None:
            self._compare_data(run, saved)
        if self.waiting is not None:
            self.waiting()
        self._share(run)

    def _share(self, run: Any) -> None:
        if self.must_share:
            self.must_share = False
            run.hooks.when_positioned(partial(share_facts, run))  # after the data are compared

    def _compare_data(self, run: Run, saved: Mapping[str, Any]) -> None:
        """Compare the data objects once the order has reached its position.

        Within an epoch they are compared again after a batch or at its end, because a sampler that counts epochs counts
        when its first index is drawn.
        """
        differences = differing(saved["data"], encode_data(run))
        changes = {path: (was, now) for path, was, now in differences if run.progress.batch or "by_epoch" not in now}
        handles: list[Handle] = []

        def report() -> None:
            self.waiting = None
            for handle in handles:
                handle.remove()
            remaining = {path for path, *_ in differing(saved["data"], encode_data(run))}
            for path in (path for path in changes if path in remaining):
                cause = "the training changed it" if path in saved["data_changed"] else "the program sets it"
                before, present = show_both(*changes[path])
                run.data.report_difference(f"{path} was {before} and is {present}: {cause}")

        if changes and run.progress.batch:
            self.waiting = report
            handles += [run.bus.on(event, lambda run, event: report()) for event in (BatchEnd, EpochEnd)]  # noqa: ARG005
        elif changes:
            report()


# Reports changes by handlers of `EpochStart`, which run a second time.
def _compare_start(run: Run, saved: Mapping[str, Any], before: Graph, weights: Mapping[str, int]) -> None:
    handlers = f"after EpochStart was handled again by {', '.join(_handlers(run)) or 'a plugin'}"
    now = learning_rates(run)
    if now != saved["rates"]:
        run.data.report_difference(f"{handlers}: the learning rates are {now} and were {saved['rates']}")
    changed = Comparison(before, capture_graph(find_roots(run))).paths
    if weights:
        changed |= {path for path, value in _sums(run).items() if value != weights.get(path)}
    for path in sorted(changed):
        run.data.report_difference(f"{handlers}: {path} changed when the epoch was resumed")


def share_facts(run: Any) -> None:
    # a collective: other ranks may read other data
    if run.control.is_shared:
        for facts in run.engine.gather_objects(run.data.resume_facts()):
            for path, kind in facts.untracked.items():
                run.data.report_untracked(path, kind)
            for text in facts.differences:
                run.data.report_difference(text)


def _handlers(run: Run) -> list[str]:
    listeners = run.bus.signal(EpochStart).listeners()
    owners = [entry.owner for receiver, entry in listeners if not is_ours(str(getattr(receiver, "__module__", "")))]
    return list(dict.fromkeys(owners))


def _sums(run: Run) -> dict[str, int]:
    tensors = {
        f"{name}.{key}": tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for name, module in run.modules.items()
        for key, tensor in (*module.named_parameters(), *module.named_buffers())
        if not tensor.is_meta and tensor.layout is torch.strided
    }
    return sums(tensors)


def learning_rates(run: Run) -> list[float]:
    return [float(group["lr"]) for optimizer in run.optimizers.values() for group in optimizer.param_groups]


def _baseline(run: Run) -> Graph:
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


def _write_back(run: Run, roots: Roots) -> None:
    for kind, parts in ((OPTIMIZER, run.optimizers), (SCHEDULER, run.schedulers)):
        for name, part in parts.items():
            attributes = vars(roots.objects[kind + name]).items()
            vars(part).update({key: item for key, item in attributes if "[" not in key})  # no hooks


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
