"""States of sharded modules and optimizers: gathered, or as shards for `torch.distributed.checkpoint`.

Gathered states are those of plain modules and optimizers, `(weights by module name, optimizer states by name)`, which
any engine loads. Sharded states have two parts: the tensors, flat by name, which `dcp.save` writes and `dcp.load`
fills; and the remaining plain values, which are the same on all ranks and list the tensors for `dcp.load`.

To save, on all ranks, with `async_save` instead of `save` to save in the background:
            tensors, rest = engine.shard_state(run.modules, run.optimizers)
            dcp.save(tensors, checkpoint_id=folder, process_group=engine.saving_group())  # `rest` belongs in the state
To resume, on all ranks:
            engine.load_shard_state(run.modules, run.optimizers, rest, lambda tensors: dcp.load(tensors, ...))
Without ranks, or on another engine:
            tensors = empty_tensors(rest); dcp.load(tensors, checkpoint_id=folder, no_dist=True)
            engine.unpack(run.modules, run.optimizers, join_states(tensors, rest))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroup

from ..system.extras import kind_of
from .contract import Modules, Optimizers
from .options import state_of
from .weights import load_module

Wrap = Callable[[nn.Module], bool]
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
STEPS = ("training_step", "validation_step", "test_step")


class Sharding:
    """The modules of a run under `fully_shard`, in place, and how to undo that.

    The original parameters are kept without their data, and get it back at the end, so references to them remain valid.

    Args:
        modules: by attribute name; may be nested.
        shard: calls `fully_shard` on one module, with the options of the engine.
        wrap: returns True for a submodule that is gathered separately; None for `blocks`.
        separate: kinds of submodules that are always gathered separately.

    Raises:
        ValueError: a parameter could never be gathered.
    """

    def __init__(
        self,
        modules: Modules,
        shard: Callable[[nn.Module], Any],
        wrap: Wrap | None = None,
        separate: tuple[type[nn.Module], ...] = (),
    ) -> None:
        self.roots = root_modules(modules)
        self._plain = {module: set(vars(module)) for root in self.roots for module in root.modules()}
        self._classes = {module: type(module) for module in self._plain}
        self._slots = [(module, name, part) for module in self._plain for name, part in _direct_parameters(module)]
        self._devices = {part: part.device for root in self.roots for part in (*root.parameters(), *root.buffers())}
        self._steps: list[tuple[nn.Module, str]] = []
        named = set(modules.values())
        for root in self.roots:
            chosen = set(blocks(root) if wrap is None else filter(wrap, root.modules()))
            chosen |= {module for module in root.modules() if module in named or isinstance(module, separate)}
            for module in sort_inner_first(root, chosen):
                plain_parameters = [value for value in module.parameters() if value in self._devices]
                shard(module)
                for plain in plain_parameters:  # at once, so that the complete model is never on the device
                    plain.grad, plain.data = None, plain.data.new_empty(0)
        # After `fully_shard`, each slot has a shard; a parameter may have had several slots.
        self.shards: dict[Tensor, Tensor] = {plain: getattr(module, name) for module, name, plain in self._slots}
        self._added = {module: vars(module).keys() - names for module, names in self._plain.items()}
        for root in self.roots:
            if not has_forward(root):
                self._hook_steps(root)

    def wrapped(self) -> Iterator[Any]:
        """Yield the modules that are gathered separately."""
        for module, kind in self._classes.items():
            if type(module) is not kind:
                yield module

    def undo(self) -> None:
        """Restore plain, complete modules on their original devices. A collective."""
        for module in self.wrapped():
            module.reshard()
        done: set[Tensor] = set()
        for module, name, plain in self._slots:
            if plain not in done:
                shard: nn.Parameter = getattr(module, name)
                plain.data = gather_tensor(shard).to(self._devices[plain])
                plain.requires_grad_(shard.requires_grad)
                done.add(plain)
            module._parameters[name] = plain
        for buffer in (value for root in self.roots for value in root.buffers()):
            buffer.data = buffer.data.to(self._devices.get(buffer, buffer.device))
        self.release()

    def release(self) -> None:
        """Remove everything of `fully_shard` but the shards, and drop references to the process group.

        Losses and errors of the run still refer to objects that gathered the weights. While there is a reference to a
        gloo group, its connections stay open, and a peer that waits in it does not notice that this rank has left.
        """
        seen: set[int] = set()
        for module in self.wrapped():
            _drop_groups(module._get_fsdp_state(), seen)
        for module in self._plain:
            self._unhook(module)
        for module, name in self._steps:
            delattr(module, name)

    def _hook_steps(self, task: nn.Module) -> None:
        # A task that is a module has no forward, so its parameters are gathered around its steps.
        from torch.distributed.fsdp import register_fsdp_forward_method

        for name in STEPS:
            if callable(getattr(task, name, None)):
                self._steps.append((task, name))
                register_fsdp_forward_method(task, name)

    def _unhook(self, module: nn.Module) -> None:
        # Removes what `fully_shard` and the first forward left on a module; torch has no API for that.
        from torch.distributed._composable_state import _module_state_mapping

        tables = [value for name, value in vars(module).items() if "_hooks" in name and isinstance(value, dict)]
        keys = {key for hooks in tables for key, hook in hooks.items() if _is_of_fsdp(hook)}
        for hooks in tables:
            for key in keys:
                hooks.pop(key, None)
        for name in self._added[module]:
            delattr(module, name)
        module.__class__ = self._classes[module]
        _module_state_mapping.pop(module, None)


def root_modules(modules: Modules) -> list[nn.Module]:
    """Return the outermost modules that have parameters and are called.

    Raises:
        ValueError: a parameter is in a module that is never called, or in two roots.
    """
    within = {part for module in modules.values() for part in module.modules() if part is not module}
    outer = {module: name for name, module in modules.items() if module not in within}
    called = [part for module, name in outer.items() for part in _called_modules(module, name)]
    owners: dict[Tensor, nn.Module] = {}
    for root in called:
        for parameter in root.parameters():
            if owners.setdefault(parameter, root) is not root:
                raise ValueError(
                    f"{_kind(owners[parameter])} and {_kind(root)} share a parameter of shape "
                    f"{list(parameter.shape)}, but FSDPEngine gathers modules separately. Put them into one module, or "
                    f"use DDPEngine."
                )
    return called


def _called_modules(module: nn.Module, name: str) -> Iterator[nn.Module]:
    # A module without a forward is replaced by its parts.
    if next(module.parameters(), None) is None:
        return
    if has_forward(module) or any(callable(getattr(module, step, None)) for step in STEPS):
        yield module
    elif next(module.parameters(recurse=False), None) is not None:
        raise ValueError(
            f"{name!r} is {kind_of(module)} with parameters and without a forward: FSDPEngine gathers "
            f"parameters around forward. Put them into a module that is called, or use DDPEngine."
        )
    else:
        for part, child in module.named_children():
            yield from _called_modules(child, f"{name}.{part}")


def check_trained(optimizer: torch.optim.Optimizer, modules: Modules) -> None:
    """Raise ValueError if an optimizer has parameters that are not in the modules."""
    parameters = {parameter for module in modules.values() for parameter in module.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in parameters:
                raise ValueError(
                    f"{_kind(optimizer)} trains a parameter of shape {list(parameter.shape)} that is in no module of "
                    f"the task, so it would not be sharded: create the optimizer from the task's parameters."
                )


def has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict`: a model's layers."""
    for child in module.children():
        if isinstance(module, CONTAINERS) and has_forward(child):
            yield child
        else:
            yield from blocks(child)


def sort_inner_first(root: nn.Module, chosen: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the chosen modules and the root, inner ones first.

    Modules without parameters are left out, and those that share a parameter with another module: their parent gathers
    them.
    """
    wanted, uses = set(chosen), _uses(root)

    def is_separable(module: nn.Module) -> bool:
        inner_uses = _uses(module)
        return bool(inner_uses) and has_forward(module) and inner_uses.items() <= uses.items()

    inner = [module for module in root.modules() if module is not root and module in wanted and is_separable(module)]
    return [*reversed(inner), root]


def _uses(module: nn.Module) -> dict[Tensor, int]:
    counts: dict[Tensor, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        counts[parameter] = counts.get(parameter, 0) + 1
    return counts


def _direct_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, value) for name, value in module._parameters.items() if value is not None)


def _is_of_fsdp(part: Any) -> bool:
    return (getattr(part, "__module__", None) or "").startswith("torch.distributed.fsdp")


def forget_forwards(module: Any) -> None:
    """Clear the recorded forward passes of a module without a backward pass, as in an evaluation.

    The next backward pass prefetches by them. Ranks that evaluated different numbers of batches would prefetch
    differently, and so wait for each other for ever.
    """
    state = module._get_fsdp_state()
    getattr(state._comm_ctx, "post_forward_order", []).clear()  # missing before the first forward pass
    group = state._fsdp_param_group
    if group is not None:
        group._post_forward_indices.clear()


def _drop_groups(part: Any, seen: set[int]) -> None:
    # FSDP's own objects refer to process groups, also in nested containers.
    if isinstance(part, list | tuple | set):
        for item in part:
            _drop_groups(item, seen)
    elif _is_of_fsdp(part) and not isinstance(part, Enum | type) and id(part) not in seen:
        seen.add(id(part))
        for name, value in list(getattr(part, "__dict__", {}).items()):
            if isinstance(value, ProcessGroup):
                object.__setattr__(part, name, None)
            else:
                _drop_groups(value, seen)


def _kind(owner: object) -> str:
    return type(owner).__name__


def check_wrap(shard: Any) -> Wrap | None:
    """Return the predicate of `shard=`: None, a function of a module, or one or several module classes."""
    if shard is None or (callable(shard) and not isinstance(shard, type)):
        return shard
    kinds = shard if isinstance(shard, type) else tuple(shard)
    return lambda module: isinstance(module, kinds)


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor (a collective), or a plain tensor as it is."""
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, parameter: Any) -> Tensor:
    """Return rank 0's tensor sharded like a parameter of its shape, or a plain tensor as it is. A collective."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    with torch.no_grad():
        return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


States = tuple[dict[str, Any], dict[str, Any]]


def gather_state(value: Any, *, keep: bool) -> Any:
    """Return a state with its shards gathered on the CPU if `keep` is set; otherwise only take part. A collective."""
    if isinstance(value, Mapping):
        return {key: gather_state(item, keep=keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gather_state(item, keep=keep) for item in value)
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return value
    full = gather_tensor(value)
    return full.cpu() if keep else None


def load_modules(modules: Modules, weights: Mapping[str, Any]) -> None:
    """Load complete weights into sharded modules. A collective."""
    for name, module in modules.items():
        state = state_of(module)
        load_module(name, module, {key: _sharded_copy(value, state.get(key)) for key, value in weights[name].items()})


def load_optimizers(optimizers: Optimizers, states: Mapping[str, Any]) -> None:
    """Load complete states into the optimizers of sharded parameters. A collective."""
    for name, optimizer in optimizers.items():
        parts = dict(_numbered(optimizer))
        saved = states[name]
        numbers = list(chain.from_iterable(group["params"] for group in saved["param_groups"]))
        state = {
            number: {key: _sharded_copy(value, parts.get(place)) for key, value in saved["state"][number].items()}
            for place, number in enumerate(numbers)
            if number in saved["state"]
        }
        optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})


def replace_parameters(optimizer: torch.optim.Optimizer, parameters: Mapping[Tensor, Tensor]) -> None:
    """Make an optimizer train other parameters instead of its own, with its state sharded like them. A collective."""
    state = optimizer.state
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            group["params"][place] = new = parameters[old]
            if old in state:
                state[new] = {key: _move(value, new) for key, value in state.pop(old).items()}


def split_states(states: States) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of states, flat by name, and the rest."""
    weights, optimizers = states
    tensors: dict[str, Tensor] = {}
    plain_state: dict[str, Any] = {"modules": {}, "optimizers": {}}
    for name, values in weights.items():
        plain_state["modules"][name] = _pop_tensors(values, f"modules/{name}", tensors)
    for name, state in optimizers.items():
        plain = {
            number: _pop_tensors(values, f"optimizers/{name}/{number}", tensors)
            for number, values in state["state"].items()
        }
        plain_state["optimizers"][name] = {**state, "state": plain}
    plain_state["tensors"] = {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()}
    return tensors, plain_state


def join_states(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> States:
    """Return the states that `split_states` separated."""
    weights = {name: dict(values) for name, values in rest["modules"].items()}
    optimizers = {
        name: {**state, "state": {number: dict(values) for number, values in state["state"].items()}}
        for name, state in rest["optimizers"].items()
    }
    for name, tensor in tensors.items():
        kind, _, place = name.partition("/")
        if kind == "modules":
            module, _, key = place.partition("/")
            weights[module][key] = tensor
        else:
            optimizer, number, key = place.rsplit("/", 2)
            optimizers[optimizer]["state"][int(number)][key] = tensor
    return weights, optimizers


def empty_tensors(rest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return complete tensors on the CPU for `dcp.load` to fill."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (shape, dtype) in rest["tensors"].items()
    }


def allocate(modules: Modules, optimizers: Optimizers, rest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors for `dcp.load` to fill: the live weights, and new ones for the optimizers' state.

    Raises:
        ValueError: the shards are of other modules.
    """
    live, _ = split_states(({name: state_of(module) for name, module in modules.items()}, {}))
    parameters = {name: dict(_numbered(optimizer)) for name, optimizer in optimizers.items()}
    saved = {name for name in rest["tensors"] if name.startswith("modules/")}
    odd = [name for name in live if list(live[name].shape) != rest["tensors"].get(name, [None])[0]]
    if odd or saved != live.keys():
        names = ", ".join(sorted(odd or saved ^ live.keys())[:5])
        raise ValueError(f"The shards belong to another network than the task's: they differ in {names}.")
    tensors = {name: tensor for name, tensor in empty_tensors(rest).items() if name not in live}
    for name, tensor in tensors.items():
        optimizer, number, _ = name.removeprefix("optimizers/").rsplit("/", 2)
        parameter = parameters[optimizer][int(number)]
        if tensor.shape == parameter.shape:
            tensors[name] = torch.zeros_like(parameter, dtype=tensor.dtype, requires_grad=False)
    return live | tensors


def _pop_tensors(values: Mapping[Any, Any], place: str, tensors: dict[str, Tensor]) -> dict[Any, Any]:
    # Moves the tensors of one mapping into `tensors`; returns the other values.
    tensors |= {f"{place}/{key}": value for key, value in values.items() if isinstance(value, Tensor)}
    return {key: value for key, value in values.items() if not isinstance(value, Tensor)}


def _numbered(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Tensor]]:
    # The parameters as an optimizer's state dict numbers them.
    return enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _sharded_copy(value: Any, pattern: Any) -> Any:
    # A copy, so that nothing is shared with the loaded state.
    if not isinstance(value, Tensor):
        return deepcopy(value)
    sharded = shard_like(value, pattern)
    return value.clone() if sharded is value else sharded


def _move(value: Any, parameter: Tensor) -> Any:
    # Single numbers stay on their device.
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    return shard_like(gather_tensor(value), parameter).to(parameter.device)
