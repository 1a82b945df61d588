"""What an engine is given: its options, and the modules of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import nn

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16"]


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
    """Return the modules of a task by attribute name; the task itself where it is one."""
    if isinstance(task, nn.Module):
        return {"task": task}
    return {name: value for name, value in vars(task).items() if isinstance(value, nn.Module)}
