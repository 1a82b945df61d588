"""Attributes that no `state_dict` holds: of the task, its modules, optimizers, schedulers, datasets and samplers."""

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
from ....plugins.first_party import is_first_party
from ...data.draws.equality import set_by_epoch
from ...data.draws.users_code import is_users
from ...data.streams import Streams
from ...engines.options import COMPILED
from ...engines.weights import plain_name
from .values import GENERATORS, HEAVY, Weigh, encode_and_weigh

MODULE_ATTRIBUTES: Final = frozenset({*vars(nn.Module()), "_compiled_call_impl"}) - {"training"}
MODULE_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OPTIMIZER_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
PARAMETER_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
CLASS: Final = "__class__"
OPTIMIZER_ATTRIBUTES: Final = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))) | {"_opt_called", "step"}
SCHEDULER_ATTRIBUTES: Final = frozenset({"optimizer", "_get_lr_called_within_step", "_is_initial", "_schedulers"})
READERS: Final = ("dataset", "sampler", "batch_sampler", "collate_fn")


@dataclass(slots=True)
class Attribute:
    """One attribute.

    Attributes:
        value: its value.
        holder: the object that has it; None if it is compared only, and never set.
        name: its name in that object.
        is_data: whether it belongs to a dataset or sampler: it may be large, and its draws are keyed.
        package: the package of the holder's class.
        follows_epoch: whether `set_epoch` sets it, and so will again before anything is read.
    """

    value: Any
    holder: Any = None
    name: str = ""
    is_data: bool = False
    package: str = ""
    follows_epoch: bool = False

    @property
    def is_users(self) -> bool:
        """Whether the holder's class is the user's to change."""
        return self.package not in ("", "torch") and not is_first_party(self.package)

    def restore(self, saved: Any, weights: Collection[int] = ()) -> None:
        """Set the attribute to a saved value: containers and tensors, which others may reference, in place.

        Args:
            saved: the value.
            weights: addresses of storages that a `state_dict` restores, and that must not be written to.
        """
        assert self.holder is not None
        if (restored := fill(self.value, saved, weights)) is not self.value:
            setattr(self.holder, self.name, restored)


def fill(now: Any, saved: Any, weights: Collection[int] = ()) -> Any:
    """Return the saved value; containers and tensors in `now` are filled in place, as others may reference them."""
    if isinstance(saved, Tensor) and isinstance(now, Tensor):
        if not (_has_same_form(now, saved) and now.is_contiguous() and _storage(now) not in {None, *weights}):
            return saved.to(now.device)
        with torch.no_grad():
            now.copy_(saved)
        return now
    if isinstance(saved, dict) and isinstance(now, dict):
        items = {key: fill(now.get(key), item, weights) for key, item in saved.items()}
        now.clear()
        now.update(items)
        return now
    if type(saved) is list and type(now) is list:
        padded = [*now, *[None] * (len(saved) - len(now))]
        now[:] = [fill(each, item, weights) for each, item in zip(padded, saved, strict=False)]
        return now
    if type(saved) is tuple and type(now) is tuple and len(saved) == len(now):
        filled = tuple(fill(each, item, weights) for each, item in zip(now, saved, strict=True))
        return now if all(one is other for one, other in zip(now, filled, strict=True)) else filled
    return saved


def _has_same_form(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.layout is torch.strided


def _storage(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None if it has none of its own, such as a DTensor."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


def state_dict_storages(run: Run) -> set[int]:
    """Return the addresses of the storages of all weights and buffers that the `state_dict` of a run holds."""
    saved = (each for module in run.modules.values() for each in module.state_dict(keep_vars=True).values())
    found = {_storage(each) for each in saved if isinstance(each, Tensor)}
    return {each for each in found if each is not None}


def find_attributes(run: Run) -> dict[str, Attribute]:
    """Return every attribute of a run that no `state_dict` holds, by its path."""
    found: dict[str, Attribute] = {}
    is_training = run.phase == "train"  # during an evaluation, every module is in eval mode
    for root, module in run.modules.items():
        for path, submodule in module.named_modules():
            if COMPILED not in submodule._modules:  # torch.compile's own, whose attributes are of this process
                where = plain_name(f"{root}.{path}" if path else root)
                found.update(_module_attributes(where, submodule, with_mode=is_training))
    if not isinstance(run.task, nn.Module):
        found.update(_attributes_of(run.task, "task", skip=run.modules))
    for name, optimizer in run.optimizers.items():
        names = [each for each in vars(optimizer) if each.startswith("_") and not _is_own(optimizer)]
        found.update(_drop_holders(_attributes_of(optimizer, name, skip=OPTIMIZER_ATTRIBUTES.union(names))))
        found.update(_hooks(optimizer, name, OPTIMIZER_HOOKS))
    for name, scheduler in run.schedulers.items():
        found.update(_drop_holders(_scheduler_attributes(scheduler, f"the scheduler of {name}")))
    sets, train = run.validation_loaders, run.train_loader
    loaders = {f"{name} ": each for name, each in train.loaders.items()} if isinstance(train, Streams) else {"": train}
    loaders |= {f"validation {name} ".replace("  ", " "): each for name, each in sets.items()}
    for prefix, loader in loaders.items():
        for name in READERS:
            found.update(_reader_attributes(getattr(loader, name, None), f"{prefix}{name.replace('_', ' ')}"))
    return found


def _attributes_of(holder: Any, where: str, skip: Any = ()) -> Iterator[tuple[str, Attribute]]:
    ignored, package = ignored_names(holder), package_of(holder)
    for name, value in getattr(holder, "__dict__", {}).items():
        if name not in skip and name not in ignored and not name.startswith("__"):  # torch's own
            yield f"{where}.{name}", Attribute(value, holder, name, package=package)


def _module_attributes(where: str, module: nn.Module, *, with_mode: bool) -> Iterator[tuple[str, Attribute]]:
    yield from _attributes_of(module, where, MODULE_ATTRIBUTES if with_mode else MODULE_ATTRIBUTES | {"training"})
    yield f"{where}.{CLASS}", Attribute(type(module).__qualname__)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield from _parameter_attributes(f"{where}.{name}", parameter)
    for name in module._non_persistent_buffers_set:
        yield f"{where}.{name}", Attribute(module._buffers[name], module, name)
    yield from _hooks(module, where, MODULE_HOOKS)


def _parameter_attributes(where: str, parameter: nn.Parameter) -> Iterator[tuple[str, Attribute]]:
    yield f"{where}.requires_grad", Attribute(parameter.requires_grad, parameter, "requires_grad")
    for name, value in vars(parameter).items():
        if not name.startswith("_"):  # an engine's own
            yield f"{where}.{name}", Attribute(value, parameter, name)
    yield from _hooks(parameter, where, PARAMETER_HOOKS)


def _hooks(holder: Any, where: str, kinds: Iterable[str]) -> Iterator[tuple[str, Attribute]]:
    """Yield the user's own hooks, one attribute for each kind."""
    for kind in kinds:
        if hooks := [hook for hook in (getattr(holder, kind, None) or {}).values() if _is_own(hook)]:
            yield f"{where}.{kind.removeprefix('_')}", Attribute(hooks)


def _scheduler_attributes(scheduler: Any, where: str) -> Iterator[tuple[str, Attribute]]:
    kept: Mapping[str, Any] = scheduler.state_dict()
    for path, each in _attributes_of(scheduler, where, skip=SCHEDULER_ATTRIBUTES):
        name = path.rpartition(".")[2]
        if name not in kept or name in ("lr_lambdas", "lr_lambda"):  # its state_dict holds no closures
            yield path, each


def _reader_attributes(reader: Any, where: str) -> Iterator[tuple[str, Attribute]]:
    """Yield the attributes of the user's own dataset, sampler or function, inside of torch's wrappers too."""
    if isinstance(reader, Subset):
        indices = reader.indices if type(reader.indices) is list else list(reader.indices)
        yield f"{where}.indices", Attribute(indices, is_data=True)
        yield from _reader_attributes(reader.dataset, where)
    elif isinstance(reader, ConcatDataset):
        for number, each in enumerate(reader.datasets):
            yield from _reader_attributes(each, f"{where} {number}")
    elif isinstance(reader, TensorDataset):
        for number, tensor in enumerate(reader.tensors):
            yield f"{where}.tensors {number}", Attribute(tensor, is_data=True)
    elif isinstance(reader, WeightedRandomSampler | SubsetRandomSampler):
        held = reader.weights if isinstance(reader, WeightedRandomSampler) else reader.indices
        yield (
            f"{where}.{'weights' if isinstance(reader, WeightedRandomSampler) else 'indices'}",
            Attribute(held, is_data=True),
        )
    elif isinstance(reader, FunctionType | partial):
        yield where, Attribute(reader, is_data=True)
    elif reader is not None and _is_own(reader):
        names = set_by_epoch(type(reader))
        for path, attribute in _attributes_of(reader, where):
            if isinstance(attribute.value, GENERATORS):  # keyed, or found by the probe; many are made when first needed
                continue
            follows_epoch = path.rpartition(".")[2] in names
            yield path, Attribute(attribute.value, is_data=True, package=attribute.package, follows_epoch=follows_epoch)


def _drop_holders(found: Iterator[tuple[str, Attribute]]) -> Iterator[tuple[str, Attribute]]:
    """Yield attributes without their holders: they are compared only."""
    for where, each in found:
        yield where, Attribute(each.value, package=each.package)


def ignored_names(holder: Any) -> Collection[str]:
    """Return `resume_ignores` of a class: the names of attributes that the training does not depend on.

    Raises:
        TypeError: it is not a tuple, list or set of names.
    """
    names = getattr(type(holder), "resume_ignores", ())
    if type(names) is tuple and not names:
        return ()
    if not isinstance(names, tuple | list | set | frozenset) or not all(isinstance(each, str) for each in names):
        raise TypeError(
            f"{type(holder).__name__}.resume_ignores must be a tuple of names of attributes, got {names!r}."
        )
    return names


def package_of(holder: Any) -> str:
    """Return the name of the package of an object's class."""
    return type(holder).__module__.partition(".")[0]


def _is_own(thing: Any) -> bool:
    """Return whether a class or function is the user's: not of Python, of a library or of heliograph."""
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return is_users(str(kind.__module__))


def find_holder(run: Run, where: str) -> tuple[Any, str]:
    """Return the task, module or parameter that an attribute belongs to, else None, and the attribute's name."""
    parent, _, name = where.rpartition(".")
    if parent == "task":
        return run.task, name
    root, _, path = parent.partition(".")
    for find in (nn.Module.get_submodule, nn.Module.get_parameter):
        with suppress(AttributeError):
            return (find(run.modules[root], path) if root in run.modules else None), name
    return None, name


def encode_attributes(found: Mapping[str, Attribute], weigh: Weigh | None = None) -> dict[str, dict[str, Any]]:
    """Return attributes as plain data.

    Args:
        found: the attributes, by where they are.
        weigh: called with where each is that takes long, with what is kept of it, and with the microseconds.
    """
    encoded: dict[str, dict[str, Any]] = {}
    for where, each in found.items():
        encoded[where], weight = encode_and_weigh(each.value, is_data=each.is_data, package=each.package)
        if weight > HEAVY and weigh is not None:
            weigh(where, encoded[where], weight)
    return encoded
