"""The options of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import torch

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
