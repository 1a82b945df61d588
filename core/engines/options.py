"""The options of engines, and the modules of a task with their modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeGuard

import torch
from torch import nn

if TYPE_CHECKING:
    from .contract import Modules, ShardingEngine

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16"]
COMPILED = "_orig_mod"  # the attribute of `torch.compile(module)` with the original module


class ComputeOptions(TypedDict, total=False):
    """Options of all engines; each has a default.

    Attributes:
        precision: `fp32`, `tf32`, `bf16` or `fp16`; see `Precision`.
        deterministic: use deterministic algorithms only; an operation without one raises.
        cudnn_benchmark: let cuDNN time its algorithms and choose the fastest; not in a validation or test.
    """

    precision: PrecisionName
    deterministic: bool
    cudnn_benchmark: bool


class EngineOptions(ComputeOptions, total=False):
    """Options of the trainer for its engine: `ComputeOptions` and the device.

    Attributes:
        device: `cpu`, `cuda`, `cuda:1`, `mps`; instead of `gpus` and `use_cpu`.
        gpus: the numbers of the GPUs to use, one for each process on this machine.
        use_cpu: True for the CPU, False for a GPU or an error; None takes a GPU if there is one.
    """

    device: str | torch.device | None
    gpus: Sequence[int] | None
    use_cpu: bool | None


def modules_of(task: Any) -> dict[str, nn.Module]:
    """Return the modules of a task by attribute name, or the task itself; a compiled module is unwrapped."""
    named = {"task": task} if isinstance(task, nn.Module) else vars(task)
    return {name: getattr(value, COMPILED, value) for name, value in named.items() if isinstance(value, nn.Module)}


def plain_name(name: str) -> str:
    """Return the name of a parameter or submodule without the marks of `torch.compile`."""
    return ".".join(part for part in name.split(".") if part != COMPILED) if COMPILED in name else name


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return the state of a module by plain names."""
    return {plain_name(name): value for name, value in module.state_dict().items()}


def parameters_of(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module by plain names."""
    for name, parameter in module.named_parameters(remove_duplicate=remove_duplicate):
        yield plain_name(name), parameter


def is_sharding(engine: object) -> TypeGuard[ShardingEngine]:
    """Return True if the ranks of an engine each have a part of the state."""
    return hasattr(engine, "shard_state")


def begin_train_mode(modules: Modules) -> str | None:
    """Put modules into train mode, except those that the user has put into eval mode.

    If every trained module is in eval mode, the user's own evaluation has left it there: then all modules except frozen
    ones are put into train mode, and a warning is returned.
    """
    parts = [part for root in modules.values() for part in root.modules()]
    trained = [part for part in parts if any(value.requires_grad for value in part.parameters(recurse=False))]
    if trained and not any(part.training for part in trained):
        frozen = [part for name, root in modules.items() for _, part in frozen_parts(name, root) if not part.training]
        for root in modules.values():
            root.train()
        for part in frozen:
            part.eval()
        return (
            "Every trained module was in eval mode when the run began, as after your own evaluation or "
            "from_pretrained, and was put into train mode. Call model.train() before fit; to train in eval mode, call "
            "model.eval() in a handler of TrainStart."
        )
    evaluating = [part for part in parts if not part.training]
    for root in modules.values():
        if root.training:
            root.train()  # a module's own train() may keep parts in eval mode
    for part in evaluating:
        part.training = False
    return None


def frozen_parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules without trainable parameters, with their names."""
    trained = [parameter.requires_grad for parameter in module.parameters()]
    if trained and not any(trained):
        yield name, module
        return
    for part, child in module.named_children():
        yield from frozen_parts(f"{name}.{part}", child)


def warning_of_frozen(modules: Modules) -> str | None:
    """Return a warning about frozen modules in train mode that have dropout or batch norm."""
    outermost = [part for name, root in modules.items() for part in frozen_parts(name, root)]
    names = [name for name, module in outermost if any(map(_acts_in_train_mode, module.modules()))]
    if not names:
        return None
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"Frozen, as none of their parameters requires gradients, but in train mode: {', '.join(names[:3])}{more}. "
        f"Their dropout is active and the statistics of their batch norms change. Call eval() on them before fit; "
        f"fit keeps that mode."
    )


def _acts_in_train_mode(part: nn.Module) -> bool:
    if not part.training:
        return False
    if isinstance(part, nn.modules.batchnorm._NormBase):
        return part.running_mean is not None
    if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
        return part.dropout > 0
    return isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
