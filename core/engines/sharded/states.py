"""States of sharded modules and optimizers: gathered whole, or as shards for `torch.distributed.checkpoint`.

Whole, they are what plain modules and optimizers have: `(weights by module name, optimizer states by name)`, and any
engine reads them. As shards they are two things: the tensors, flat by name, which `dcp.save` writes and `dcp.load`
fills; and the rest, plain types, which is the same on all ranks and says what `dcp.load` is to fill.

To save, on all ranks, with `async_save` in the place of `save` where it is to happen in the background:
            tensors, rest = engine.shard_state(run.modules, run.optimizers)
            dcp.save(tensors, checkpoint_id=folder, process_group=engine.saving_group())  # `rest` belongs in the state
To resume, on all ranks:
            engine.load_shard_state(run.modules, run.optimizers, rest, lambda tensors: dcp.load(tensors, ...))
Without ranks, or on another engine:
            tensors = empty(rest); dcp.load(tensors, checkpoint_id=folder, no_dist=True)
            engine.unpack(run.modules, run.optimizers, joined(tensors, rest))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from enum import Enum
from itertools import chain
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroup

from ...system.extras import kind_of
from ..weights import load_module, state_of

Wrap = Callable[[nn.Module], bool]
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
STEPS = ("training_step", "validation_step", "test_step")
HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class Sharding:
    """The modules of a run under `fully_shard`, in place, and what it takes to undo that.

    The former parameters are kept, without their data, and get it back at the end: references to them are valid again.

    Args:
        modules: by attribute name; may lie within one another.
        shard: calls `fully_shard` on one module, with the options of the engine.
        wrap: says whether a submodule is gathered apart; None for `blocks`.
        apart: kinds of submodules that are gathered apart in any case.

    Raises:
        ValueError: some parameter could never be gathered, or a former run left the modules sharded.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        shard: Callable[[nn.Module], Any],
        wrap: Wrap | None = None,
        apart: tuple[type[nn.Module], ...] = (),
    ) -> None:
        self.roots = roots(modules)
        self._plain = {each: set(vars(each)) for root in self.roots for each in root.modules()}
        self._classes = {each: type(each) for each in self._plain}
        self._slots = [(each, name, part) for each in self._plain for name, part in _own_parameters(each)]
        self._devices = {part: part.device for root in self.roots for part in (*root.parameters(), *root.buffers())}
        self._steps: dict[tuple[nn.Module, str], Any] = {}
        named = set(modules.values())
        for root in self.roots:
            chosen = set(blocks(root) if wrap is None else filter(wrap, root.modules()))
            chosen |= {each for each in root.modules() if each in named or isinstance(each, apart)}
            for module in sort_inner_first(root, chosen):
                former = [each for each in module.parameters() if each in self._devices]
                shard(module)
                for plain in former:  # at once, so that never the whole model is on the device
                    plain.grad, plain.data = None, plain.data.new_empty(0)
        # After `fully_shard`, each slot holds a shard; the same former parameter may have had several slots.
        self.shards: dict[Tensor, Tensor] = {plain: getattr(module, name) for module, name, plain in self._slots}
        self._added = {each: vars(each).keys() - names for each, names in self._plain.items()}
        for root in self.roots:
            if not has_forward(root):
                self._hook_steps(root)

    def wrapped(self) -> Iterator[Any]:
        """Yield the modules that are gathered one by one."""
        for each, kind in self._classes.items():
            if type(each) is not kind:
                yield each

    def undo(self) -> None:
        """Make the modules plain and whole again, on the devices that they were on. A collective."""
        for module in self.wrapped():
            module.reshard()
        done: set[Tensor] = set()
        for module, name, plain in self._slots:
            if plain not in done:
                shard: nn.Parameter = getattr(module, name)
                plain.data = whole(shard).to(self._devices[plain])
                plain.requires_grad_(shard.requires_grad)
                done.add(plain)
            module._parameters[name] = plain
        for buffer in (each for root in self.roots for each in root.buffers()):
            buffer.data = buffer.data.to(self._devices.get(buffer, buffer.device))
        self.release()

    def release(self) -> None:
        """Take all of `fully_shard` off the modules but the shards, and let go of the process group.

        Losses and errors of the run still refer to what gathered the weights. As long as anything refers to a gloo
        group, its connections stay open, and a peer that waits in one never learns that this rank has left.
        """
        seen: set[int] = set()
        for module in self.wrapped():
            _let_go(module._get_fsdp_state(), seen)
        for module in self._plain:
            self._unhook(module)
        for (module, name), former in self._steps.items():
            delattr(module, name)
            if former is not None:
                setattr(module, name, former)

    def _hook_steps(self, task: nn.Module) -> None:
        """Let a task that is a module itself gather its own parameters around its steps: it has no forward."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        for name in STEPS:
            if callable(getattr(task, name, None)):
                self._steps[task, name] = vars(task).get(name)
                register_fsdp_forward_method(task, name)

    def _unhook(self, module: nn.Module) -> None:
        """Take off what `fully_shard` and the first forward left on a module; torch has no way back of its own."""
        from torch.distributed._composable_state import _module_state_mapping

        for hooks in (getattr(module, name) for name in HOOKS):
            for key in [key for key, hook in hooks.items() if _is_of_fsdp(hook)]:
                del hooks[key]
                for flags in HOOK_FLAGS:
                    getattr(module, flags).pop(key, None)
        for name in self._added[module]:
            delattr(module, name)
        module.__class__ = self._classes[module]
        _module_state_mapping.pop(module, None)


def roots(modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the modules with parameters that lie in no other one and are called.

    Raises:
        ValueError: a parameter belongs to a module that is never called, or to two roots; a module is sharded already.
    """
    from torch.distributed.tensor import DTensor

    within = {each for module in modules.values() for each in module.modules() if each is not module}
    outer = {module: name for name, module in modules.items() if module not in within}
    found = [each for module, name in outer.items() for each in _modules_called(module, name)]
    owners: dict[Tensor, nn.Module] = {}
    for root in found:
        for each in root.parameters():
            if owners.setdefault(each, root) is not root:
                raise ValueError(
                    f"{_kind(owners[each])} and {_kind(root)} share a parameter of shape {list(each.shape)}: "
                    f"FSDPEngine gathers each module's own. Put them into one module, or use DDPEngine."
                )
            if isinstance(each, DTensor):
                raise ValueError(
                    f"{_kind(root)} holds sharded parameters, as a run that failed leaves them: build a new task."
                )
            if not each.ndim:
                raise ValueError(
                    f"{_kind(root)} has a parameter that is a single number, which cannot be shared out: give it the "
                    f"shape [1], as in nn.Parameter(torch.zeros(1))."
                )
    return found


def _modules_called(module: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield a module, or its parts where it has no forward to gather parameters around."""
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
            yield from _modules_called(child, f"{name}.{part}")


def check_trained(optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError where an optimizer has parameters that are not of the modules."""
    known = {each for module in modules.values() for each in module.parameters()}
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each not in known:
                raise ValueError(
                    f"{_kind(optimizer)} trains a parameter of shape {list(each.shape)} that is in no module of the "
                    f"task, so nothing would shard it: make the optimizer from the task's parameters."
                )


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called."""
    return type(module).forward is not nn.Module.forward


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of the outermost `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict`: a model's layers."""
    for child in module.children():
        if isinstance(module, CONTAINERS) and has_forward(child):
            yield child
        else:
            yield from blocks(child)


def sort_inner_first(root: nn.Module, chosen: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the chosen modules and the root, inner ones first.

    One without parameters is left out, and one that shares a parameter with others: it stays with what is around it.
    """
    wanted, uses = set(chosen), _uses(root)

    def is_apart(module: nn.Module) -> bool:
        own = _uses(module)
        return bool(own) and has_forward(module) and all(uses[each] == count for each, count in own.items())

    inner = [each for each in root.modules() if each is not root and each in wanted and is_apart(each)]
    return [*reversed(inner), root]


def _uses(module: nn.Module) -> dict[Tensor, int]:
    counts: dict[Tensor, int] = {}
    for _, each in module.named_parameters(remove_duplicate=False):
        counts[each] = counts.get(each, 0) + 1
    return counts


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, each) for name, each in module._parameters.items() if each is not None)


def _is_of_fsdp(part: Any) -> bool:
    return (getattr(part, "__module__", None) or "").startswith("torch.distributed.fsdp")


def forget_forwards(module: Any) -> None:
    """Let a module forget the forward passes that no backward pass followed, as in an evaluation.

    By them it would choose what to gather ahead in the next backward pass, where ranks that evaluated other numbers of
    batches would choose differently, and so wait for each other for ever.
    """
    state = module._get_fsdp_state()
    getattr(state._comm_ctx, "post_forward_order", []).clear()  # it comes with the first forward pass
    group = state._fsdp_param_group
    if group is not None:
        group._post_forward_indices.clear()


def _let_go(part: Any, seen: set[int]) -> None:
    """Drop the process groups that FSDP's own objects refer to, wherever they lie in one another."""
    if isinstance(part, list | tuple | set):
        for each in part:
            _let_go(each, seen)
    elif _is_of_fsdp(part) and not isinstance(part, Enum | type) and id(part) not in seen:
        seen.add(id(part))
        for name, value in list(getattr(part, "__dict__", {}).items()):
            if isinstance(value, ProcessGroup):
                object.__setattr__(part, name, None)
            else:
                _let_go(value, seen)


def _kind(owner: object) -> str:
    return type(owner).__name__


def check_wrap(shard: Any) -> Wrap | None:
    """Return the rule that `shard=` gives: None, a module class, several, or a function of a module.

    Raises:
        TypeError: it is none of these.
    """
    if shard is None:
        return None
    kinds = shard if isinstance(shard, Sequence) and shard else [shard]
    if all(isinstance(each, type) and issubclass(each, nn.Module) for each in kinds):
        return lambda module: isinstance(module, tuple(kinds))
    if callable(shard) and not isinstance(shard, type):
        return lambda module: bool(shard(module))
    raise TypeError(
        f"shard= takes module classes, as in shard=(nn.TransformerEncoderLayer,), or a function of a module that says "
        f"whether it is gathered apart; got {shard!r}."
    )


def whole(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor, any other one as it is. A collective for a sharded one."""
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor laid out as a parameter of its shape is, rank 0's; any other one as it is. A collective."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    with torch.no_grad():
        return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


Optimizers = Mapping[str, torch.optim.Optimizer]
Modules = Mapping[str, nn.Module]
States = tuple[dict[str, Any], dict[str, Any]]
Read = Callable[[dict[str, Tensor]], object]


@runtime_checkable
class ShardingEngine(Protocol):
    """An engine whose ranks each hold a part of the state, and can save it so.

    Attributes:
        state: what a checkpoint is to hold: `full`, as `pack` returns it, or `sharded`.
    """

    state: Literal["full", "sharded"]

    def shard_state(self, modules: Modules, optimizers: Optimizers) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's tensors by name, for `dcp.save`, and the rest, which is the same on all ranks.

        The tensors are the live ones: `dcp.save` writes them, and `dcp.async_save` copies them, before it returns.
        """

    def saving_group(self) -> ProcessGroup:
        """Return a gloo group that nothing else uses, so that a thread may save in it. The first time a collective.

        What is being saved has to be done before the run ends: the group ends with it.
        """

    def load_shard_state(self, modules: Modules, optimizers: Optimizers, rest: Mapping[str, Any], read: Read) -> None:
        """Load what `shard_state` gave, from any number of ranks. A collective.

        Args:
            modules: by attribute name; of the same shapes.
            optimizers: by name; of the same kinds.
            rest: as `shard_state` returned it.
            read: fills tensors in place, as `dcp.load` does. Some of them are the live weights.
        """


def gather_state(value: Any, *, keep: bool) -> Any:
    """Return a state with its shards gathered, on the CPU; nothing of it unless `keep`. A collective."""
    if isinstance(value, Mapping):
        return {key: gather_state(each, keep=keep) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gather_state(each, keep=keep) for each in value)
    if not _is_shard(value):
        return value
    full = whole(value)
    return full.cpu() if keep else None


def load_modules(modules: Modules, weights: Mapping[str, Any]) -> None:
    """Load whole weights into sharded modules. A collective."""
    for name, module in modules.items():
        own = state_of(module)
        laid = {key: _laid(value, own.get(key)) for key, value in weights[name].items()}
        load_module(name, module, laid)


def load_optimizers(optimizers: Optimizers, states: Mapping[str, Any]) -> None:
    """Load whole states into the optimizers of sharded parameters. A collective."""
    for name, optimizer in optimizers.items():
        parts = dict(_numbered(optimizer))
        saved = states[name]
        numbers = list(chain.from_iterable(group["params"] for group in saved["param_groups"]))
        laid = {
            number: {key: _laid(value, parts.get(place)) for key, value in saved["state"][number].items()}
            for place, number in enumerate(numbers)
            if number in saved["state"]
        }
        optimizer.load_state_dict({"state": laid, "param_groups": saved["param_groups"]})


def point(optimizer: torch.optim.Optimizer, parameters: Mapping[Tensor, Tensor]) -> None:
    """Make an optimizer train other parameters in the place of its own, its state laid out as theirs. A collective."""
    state = optimizer.state
    for group in optimizer.param_groups:
        for place, former in enumerate(group["params"]):
            group["params"][place] = new = parameters[former]
            if former in state:
                state[new] = {key: _move(each, new) for key, each in state.pop(former).items()}


def split(states: States) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of states flat by name, and the rest."""
    weights, optimizers = states
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {"modules": {}, "optimizers": {}}
    for name, values in weights.items():
        rest["modules"][name] = _taken(values, f"modules/{name}", tensors)
    for name, state in optimizers.items():
        kept = {
            number: _taken(values, f"optimizers/{name}/{number}", tensors) for number, values in state["state"].items()
        }
        rest["optimizers"][name] = {**state, "state": kept}
    rest["tensors"] = {name: [list(each.shape), str(each.dtype)] for name, each in tensors.items()}
    return tensors, rest


def join_states(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> States:
    """Return the states that `split` took apart."""
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


def empty(rest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return whole tensors on the CPU, for `dcp.load` to fill."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (shape, dtype) in rest["tensors"].items()
    }


def room(modules: Modules, optimizers: Optimizers, rest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors for `dcp.load` to fill: the live weights, and new ones laid out for the optimizers' state.

    Raises:
        ValueError: the shards are of other modules.
    """
    live, _ = split(({name: state_of(module) for name, module in modules.items()}, {}))
    parameters = {name: dict(_numbered(optimizer)) for name, optimizer in optimizers.items()}
    saved = {name for name in rest["tensors"] if name.startswith("modules/")}
    odd = [name for name in live if list(live[name].shape) != rest["tensors"].get(name, [None])[0]]
    if odd or saved != live.keys():
        names = ", ".join(sorted(odd or saved ^ live.keys())[:5])
        raise ValueError(f"The shards are of another network than the task's: they differ in {names}.")
    tensors = {name: each for name, each in empty(rest).items() if name not in live}
    for name, tensor in tensors.items():
        optimizer, number, _ = name.removeprefix("optimizers/").rsplit("/", 2)
        parameter = parameters[optimizer][int(number)]
        if tensor.shape == parameter.shape:
            tensors[name] = torch.zeros_like(parameter, dtype=tensor.dtype, requires_grad=False)
    return live | tensors


def _taken(values: Mapping[Any, Any], place: str, tensors: dict[str, Tensor]) -> dict[Any, Any]:
    """Move the tensors of one mapping into `tensors`; return what is left."""
    tensors |= {f"{place}/{key}": value for key, value in values.items() if isinstance(value, Tensor)}
    return {key: value for key, value in values.items() if not isinstance(value, Tensor)}


def _numbered(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Tensor]]:
    """Yield the parameters as an optimizer's state dict numbers them."""
    return enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _laid(value: Any, pattern: Any) -> Any:
    """Return a whole value laid out as a pattern is; a copy, so that nothing is shared with what was loaded."""
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return like(value, pattern) if _is_shard(pattern) and value.shape == pattern.shape else value.clone()


def _move(value: Any, parameter: Tensor) -> Any:
    """Return a part of a parameter's state as another parameter has it; single numbers stay where they are."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    return like(whole(value), parameter).to(parameter.device)


def _is_shard(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)
