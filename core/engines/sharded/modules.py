"""Modules under `fully_shard`: which of them are gathered apart, and their way back to plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroup

from ...system.extras import kind_of

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
