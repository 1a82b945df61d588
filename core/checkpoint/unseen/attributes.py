"""Attributes that no state_dict holds: of the task, its modules, optimizers, schedulers, and what reads the data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from ....events import Run
from ...data.draws.equality import set_by_epoch
from ...data.draws.users_code import is_users
from .values import GENERATORS, encode

OF_MODULES: Final = frozenset({*vars(nn.Module()), "_compiled_call_impl"}) - {"training"}
HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_OF_OPTIMIZERS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
HOOKS_OF_PARAMETERS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
CLASS: Final = "__class__"
OF_OPTIMIZERS: Final = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))) | {"_opt_called", "step"}
OF_SCHEDULERS: Final = frozenset({"optimizer", "_get_lr_called_within_step", "_is_initial", "_schedulers"})
READERS: Final = ("dataset", "sampler", "batch_sampler", "collate_fn")


@dataclass(slots=True)
class Part:
    """One attribute.

    Attributes:
        value: what it is.
        holder: what it is an attribute of; None where it is not ours to give it another value.
        name: that it has there.
        is_data: whether it is of what reads the data: it may be large, and its draws are keyed.
        package: of the class that it is an attribute of.
        follows_epoch: whether `set_epoch` sets it, as it will again before anything is read.
    """

    value: Any
    holder: Any = None
    name: str = ""
    is_data: bool = False
    package: str = ""
    follows_epoch: bool = False

    @property
    def is_users(self) -> bool:
        """Whether the class that it is an attribute of is the user's to change."""
        return self.package not in ("", "torch", "heliograph")

    def restore(self, saved: Any, weights: Collection[int] = ()) -> None:
        """Give the attribute a saved value, in place where it is a container or a tensor that others may hold, too.

        Args:
            saved: the value.
            weights: storages of tensors that have their own state, and must not be written to.
        """
        assert self.holder is not None
        if (given := filled(self.value, saved, weights)) is not self.value:
            setattr(self.holder, self.name, given)


def filled(now: Any, saved: Any, weights: Collection[int] = ()) -> Any:
    """Return a value as it was saved; containers and tensors that are there stay the same objects, for others."""
    if isinstance(saved, Tensor) and isinstance(now, Tensor):
        if not (_is_alike(now, saved) and now.is_contiguous() and _storage(now) not in {None, *weights}):
            return saved.to(now.device)
        with torch.no_grad():
            now.copy_(saved)
        return now
    if isinstance(saved, dict) and isinstance(now, dict):
        items = {key: filled(now.get(key), item, weights) for key, item in saved.items()}
        now.clear()
        now.update(items)
        return now
    if type(saved) is list and type(now) is list:
        here = [*now, *[None] * (len(saved) - len(now))]
        now[:] = [filled(each, item, weights) for each, item in zip(here, saved, strict=False)]
        return now
    if type(saved) is tuple and type(now) is tuple and len(saved) == len(now):
        given = tuple(filled(each, item, weights) for each, item in zip(now, saved, strict=True))
        return now if all(one is other for one, other in zip(now, given, strict=True)) else given
    return saved


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.layout is torch.strided


def _storage(tensor: Tensor) -> int | None:
    """Return where the memory of a tensor begins; None where it has none of its own, as a DTensor."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


def storages(run: Run) -> set[int]:
    """Return where the weights and the buffers of a run lie that its `state_dict` holds."""
    saved = (each for module in run.modules.values() for each in module.state_dict(keep_vars=True).values())
    found = {_storage(each) for each in saved if isinstance(each, Tensor)}
    return {each for each in found if each is not None}


def parts(run: Run) -> dict[str, Part]:
    """Return every attribute of a run that a checkpoint does not hold otherwise, by where it is."""
    found: dict[str, Part] = {}
    is_training = run.phase == "train"  # in an evaluation, every module is in eval mode for a while
    for root, module in run.modules.items():
        for path, part in module.named_modules():
            found.update(_of_module(f"{root}.{path}" if path else root, part, with_mode=is_training))
    if not isinstance(run.task, nn.Module):
        found.update(_of(run.task, "task", skip=run.modules))
    for name, optimizer in run.optimizers.items():
        names = [each for each in vars(optimizer) if each.startswith("_") and not _is_own(optimizer)]
        found.update(_compared(_of(optimizer, name, skip=OF_OPTIMIZERS.union(names))))
        found.update(_hooks(optimizer, name, HOOKS_OF_OPTIMIZERS))
    for name, scheduler in run.schedulers.items():
        found.update(_compared(_of_scheduler(scheduler, f"the scheduler of {name}")))
    sets = run.validation_loaders
    loaders = {"": run.train_loader, **{f"validation {name} ".replace("  ", " "): each for name, each in sets.items()}}
    for prefix, loader in loaders.items():
        for name in READERS:
            found.update(_of_reader(getattr(loader, name, None), f"{prefix}{name.replace('_', ' ')}"))
    return found


def _of(holder: Any, where: str, skip: Any = ()) -> Iterator[tuple[str, Part]]:
    ignored, package = ignored_names(holder), package_of(holder)
    for name, value in getattr(holder, "__dict__", {}).items():
        if name not in skip and name not in ignored and not name.startswith("__"):  # torch keeps its own so
            yield f"{where}.{name}", Part(value, holder, name, package=package)


def _of_module(where: str, module: nn.Module, *, with_mode: bool) -> Iterator[tuple[str, Part]]:
    yield from _of(module, where, OF_MODULES if with_mode else OF_MODULES | {"training"})
    yield f"{where}.{CLASS}", Part(type(module).__qualname__)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield from _of_parameter(f"{where}.{name}", parameter)
    for name in module._non_persistent_buffers_set:
        yield f"{where}.{name}", Part(module._buffers[name], module, name)
    yield from _hooks(module, where, HOOKS)


def _of_parameter(where: str, parameter: nn.Parameter) -> Iterator[tuple[str, Part]]:
    yield f"{where}.requires_grad", Part(parameter.requires_grad, parameter, "requires_grad")
    for name, value in vars(parameter).items():
        if not name.startswith("_"):  # an engine keeps its own so
            yield f"{where}.{name}", Part(value, parameter, name)
    yield from _hooks(parameter, where, HOOKS_OF_PARAMETERS)


def _hooks(holder: Any, where: str, kinds: Iterable[str]) -> Iterator[tuple[str, Part]]:
    """Yield the user's own hooks, of each kind together."""
    for kind in kinds:
        if hooks := [hook for hook in (getattr(holder, kind, None) or {}).values() if _is_own(hook)]:
            yield f"{where}.{kind.removeprefix('_')}", Part(hooks)


def _of_scheduler(scheduler: Any, where: str) -> Iterator[tuple[str, Part]]:
    kept: Mapping[str, Any] = scheduler.state_dict()
    for name, part in _of(scheduler, where, skip=OF_SCHEDULERS):
        attribute = name.rpartition(".")[2]
        if attribute not in kept or attribute in ("lr_lambdas", "lr_lambda"):  # of functions it keeps no closures
            yield name, part


def _of_reader(reader: Any, where: str) -> Iterator[tuple[str, Part]]:
    """Yield the attributes of the user's own dataset, sampler or function; torch's are looked through."""
    if isinstance(reader, Subset):
        yield f"{where}.indices", Part(list(reader.indices), is_data=True)
        yield from _of_reader(reader.dataset, where)
    elif isinstance(reader, ConcatDataset):
        for number, each in enumerate(reader.datasets):
            yield from _of_reader(each, f"{where} {number}")
    elif isinstance(reader, TensorDataset):
        for number, tensor in enumerate(reader.tensors):
            yield f"{where}.tensors {number}", Part(tensor, is_data=True)
    elif isinstance(reader, WeightedRandomSampler | SubsetRandomSampler):
        held = reader.weights if isinstance(reader, WeightedRandomSampler) else reader.indices
        yield (
            f"{where}.{'weights' if isinstance(reader, WeightedRandomSampler) else 'indices'}",
            Part(held, is_data=True),
        )
    elif isinstance(reader, FunctionType | partial):
        yield where, Part(reader, is_data=True)
    elif reader is not None and _is_own(reader):
        told = set_by_epoch(type(reader))
        for place, part in _of(reader, where):
            if isinstance(part.value, GENERATORS):  # keyed, or found by the probe; many are made when first needed
                continue
            yield (
                place,
                Part(part.value, is_data=True, package=part.package, follows_epoch=place.rpartition(".")[2] in told),
            )


def _compared(found: Iterator[tuple[str, Part]]) -> Iterator[tuple[str, Part]]:
    """Yield attributes as those that are compared only."""
    for where, part in found:
        yield where, Part(part.value, package=part.package)


def ignored_names(holder: Any) -> Collection[str]:
    """Return the attributes that a class says the training does not depend on: its `resume_ignores`.

    Raises:
        TypeError: that is no tuple, list or set of names.
    """
    names = getattr(type(holder), "resume_ignores", ())
    if not isinstance(names, tuple | list | set | frozenset) or not all(isinstance(each, str) for each in names):
        raise TypeError(
            f"{type(holder).__name__}.resume_ignores must be a tuple of names of attributes, got {names!r}."
        )
    return names


def package_of(holder: Any) -> str:
    """Return the package that an object's class is of."""
    return type(holder).__module__.partition(".")[0]


def _is_own(thing: Any) -> bool:
    """Return whether a class or function is the user's: not Python's, not a library's, not ours."""
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return is_users(str(kind.__module__))


def holder_of(run: Run, where: str) -> tuple[Any, str]:
    """Return what an attribute belongs to, and its name there; None where that is no task, module or parameter."""
    place, _, name = where.rpartition(".")
    if place == "task":
        return run.task, name
    root, _, path = place.partition(".")
    for find in (nn.Module.get_submodule, nn.Module.get_parameter):
        with suppress(AttributeError):
            return (find(run.modules[root], path) if root in run.modules else None), name
    return None, name


def encoded(found: Mapping[str, Part]) -> dict[str, dict[str, Any]]:
    """Return attributes as plain data."""
    return {where: encode(part.value, is_data=part.is_data, package=part.package) for where, part in found.items()}
