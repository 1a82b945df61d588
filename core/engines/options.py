"""What an engine is given: its options, and the modules of a task with their modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import nn

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16"]
COMPILED = "_orig_mod"  # the part of what `torch.compile(module)` returns that is the module


class EngineOptions(TypedDict, total=False):
    """What to ask of an engine; what is left out is chosen.

    Attributes:
        device: `cpu`, `cuda`, `cuda:1`, `mps`; instead of `gpus` and `use_cpu`.
        gpus: the numbers of the GPUs to use, one for each process on this machine.
        use_cpu: True for the CPU, False for a GPU or an error; None takes a GPU where there is one.
        precision: `fp32`, `tf32`, `bf16` or `fp16`.
        deterministic: use deterministic algorithms only.
        cudnn_benchmark: let cuDNN take the fastest algorithms.
    """

    device: str | torch.device | None
    gpus: Sequence[int] | None
    use_cpu: bool | None
    precision: PrecisionName
    deterministic: bool
    cudnn_benchmark: bool


def modules_of(task: Any) -> dict[str, nn.Module]:
    """Return the modules of a task by attribute name; the task itself if it is one; of a compiled one the original."""
    named = {"task": task} if isinstance(task, nn.Module) else vars(task)
    return {name: getattr(each, COMPILED, each) for name, each in named.items() if isinstance(each, nn.Module)}


def begin_train_mode(modules: Mapping[str, nn.Module]) -> str | None:
    """Put modules into train mode, but for those that the user has put into eval mode.

    Where none that is trained is in train mode, as an evaluation of the user's own leaves a model, that is no choice of
    modules: then all are put into train mode but the frozen ones. Return a warning of that.
    """
    parts = [part for root in modules.values() for part in root.modules()]
    trained = [part for part in parts if any(each.requires_grad for each in part.parameters(recurse=False))]
    if trained and not any(part.training for part in trained):
        kept = [part for name, root in modules.items() for _, part in frozen(name, root) if not part.training]
        for root in modules.values():
            root.train()
        for part in kept:
            part.eval()
        return (
            "Every module that is trained was in eval mode when the run began, as an evaluation of your own or "
            "from_pretrained leaves it, and was put into train mode. Call model.train() before fit; to train in eval "
            "mode, call model.eval() in a handler of TrainStart."
        )
    evaluating = [part for part in parts if not part.training]
    for root in modules.values():
        if root.training:
            root.train()  # its own method may leave some of its parts in eval mode
    for part in evaluating:
        part.training = False
    return None


def frozen(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules, with their names, of which no parameter requires gradients."""
    parameters = [each.requires_grad for each in module.parameters()]
    if parameters and not any(parameters):
        yield name, module
        return
    for part, child in module.named_children():
        yield from frozen(f"{name}.{part}", child)


def warning_of_frozen(modules: Mapping[str, nn.Module]) -> str | None:
    """Return a warning of frozen modules that are in train mode, and have dropout or batch norm, which act in it."""
    outermost = [each for name, root in modules.items() for each in frozen(name, root)]
    names = [name for name, module in outermost if any(map(_acts_in_train_mode, module.modules()))]
    if not names:
        return None
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"Frozen, as none of their parameters requires gradients, but in train mode: {', '.join(names[:3])}{more}. "
        f"Dropout acts in them, and the statistics of their batch norms move. Call eval() on them before fit, which "
        f"keeps them so."
    )


def _acts_in_train_mode(part: nn.Module) -> bool:
    if not part.training:
        return False
    if isinstance(part, nn.modules.batchnorm._NormBase):
        return part.running_mean is not None
    if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
        return part.dropout > 0
    return isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
