"""Which device a process gets, where GPUs are named or several processes train together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..distributed.ranks.membership import Membership
from .options import EngineOptions

DEVICE_OPTIONS = ("device", "gpus", "use_cpu")


def choose_device(member: Membership, options: EngineOptions) -> str | torch.device | None:
    """Return the device that this process uses, None for the engine's own choice.

    Raises:
        RuntimeError: a GPU is wanted, and there is none.
        TypeError: `gpus` is no list of numbers.
        ValueError: the options contradict each other, or what the machine has.
    """
    device, gpus, use_cpu = options.get("device"), options.get("gpus"), options.get("use_cpu")
    if use_cpu not in (None, True, False):
        raise TypeError(f"use_cpu is True, False or None, got {use_cpu!r}.")
    if device is not None and (gpus is not None or use_cpu is not None):
        raise ValueError("Give device=, or gpus= and use_cpu=, not both: a device says it all.")
    if use_cpu and gpus is not None:
        raise ValueError(f"use_cpu=True and gpus={gpus!r} contradict each other: give one of them.")
    if use_cpu:
        return "cpu"
    if gpus is not None:
        return _gpu_for(member, gpus)
    alone = member.world_size == 1  # an Apple GPU serves one process
    if use_cpu is False and not torch.cuda.is_available() and not (alone and torch.backends.mps.is_available()):
        raise RuntimeError(
            "use_cpu=False wants a GPU, but torch sees none. Leave use_cpu out to take the CPU where there is no GPU; "
            "nvidia-smi and torch.version.cuda show why none is found."
        )
    return device


def _gpu_for(member: Membership, gpus: Sequence[int]) -> torch.device:
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"gpus={gpus!r} wants CUDA, but torch sees no CUDA device. Leave gpus out to take what there is (an Apple "
            f"GPU is device='mps'); nvidia-smi and torch.version.cuda show why none is found."
        )
    from .parallel.data_parallel import checked_gpus

    chosen = checked_gpus(gpus)
    if member.world_size == 1 and len(chosen) > 1:
        raise ValueError(
            f"gpus={chosen} names {len(chosen)} GPUs, but this is one process, which uses one. For all of them, start "
            f"a process for each: torchrun --nproc-per-node={len(chosen)} train.py, or heliograph.launch(main, "
            f"nprocs={len(chosen)}). One process on several GPUs is engine=DataParallelEngine(gpus={chosen}), which is "
            f"slower."
        )
    if member.local_rank >= len(chosen) or len(chosen) != (member.local_world_size or len(chosen)):
        raise ValueError(
            f"gpus={chosen} names {len(chosen)} GPUs, but {member.local_world_size or member.local_rank + 1} processes "
            f"were started on this machine: there must be one GPU for each."
        )
    return torch.device("cuda", chosen[member.local_rank])
