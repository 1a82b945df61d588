"""The device of a process, if GPUs are named or several processes train together; engines by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Unpack, cast

import torch

from ...plugins.discovery import find
from ..distributed.membership import Membership, membership
from .contract import LoopEngine
from .device import check_device
from .options import EngineOptions

DEVICE_OPTIONS = ("device", "gpus", "use_cpu")


def choose_device(member: Membership, options: EngineOptions) -> str | torch.device | None:
    """Return the device of this process, or None for the engine's own choice.

    Raises:
        RuntimeError: a GPU is requested, but there is none.
        ValueError: the options contradict each other or the machine's devices.
    """
    device, gpus, use_cpu = options.get("device"), options.get("gpus"), options.get("use_cpu")
    if (device, gpus, use_cpu).count(None) < 2:
        raise ValueError(f"Give only one of device=, gpus= and use_cpu=, got {device=}, {gpus=}, {use_cpu=}.")
    if use_cpu:
        return "cpu"
    if gpus is not None:
        return _gpu_for(member, gpus)
    alone = member.world_size == 1  # an Apple GPU serves one process
    if use_cpu is False and not torch.cuda.is_available() and not (alone and torch.backends.mps.is_available()):
        raise RuntimeError(
            "use_cpu=False needs a GPU, but torch sees none. Leave use_cpu out to fall back to the CPU; nvidia-smi and "
            "torch.version.cuda show why no GPU is visible."
        )
    return device


def _gpu_for(member: Membership, gpus: Sequence[int]) -> torch.device:
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"gpus={gpus!r} needs CUDA, but torch sees no CUDA device. Leave gpus out to use another device (an Apple "
            f"GPU is device='mps'); nvidia-smi and torch.version.cuda show why no GPU is visible."
        )
    chosen = list(gpus)
    if member.world_size == 1 and len(chosen) > 1:
        raise ValueError(
            f"gpus={chosen} names {len(chosen)} GPUs, but a single process uses one. To use all, start one process per "
            f"GPU: torchrun --nproc-per-node={len(chosen)} train.py, or heliograph.launch(main, nprocs={len(chosen)}). "
            f"One process on several GPUs is engine=DataParallelEngine(gpus={chosen}), which is slower."
        )
    if member.local_rank >= len(chosen) or len(chosen) != (member.local_world_size or len(chosen)):
        raise ValueError(
            f"gpus={chosen} names {len(chosen)} GPUs, but {member.local_world_size or member.local_rank + 1} processes "
            f"were started on this machine: each process needs one GPU."
        )
    return check_device(torch.device("cuda", chosen[member.local_rank]))


GROUP = "heliograph.engines"


def find_engine(name: str) -> Callable[..., LoopEngine]:
    """Import the engine class of a name, such as `ddp`, or `package:name` if two packages use one name.

    Raises:
        ImportError: it cannot be imported; names the broken package and the reason.
        LookupError: no engine has this name, or several have.
    """
    return cast(Callable[..., LoopEngine], find(name, GROUP).load())


def named_engine(name: str, **options: Unpack[EngineOptions]) -> LoopEngine:
    """Return an engine by its name in the entry-point group `heliograph.engines`.

    Args:
        name: such as `ddp`.
        **options: see `EngineOptions`; `gpus` and `use_cpu` choose the device of an engine that takes no `gpus`.

    Raises:
        ImportError: it cannot be imported.
        LookupError: no engine has this name, or several have.
        TypeError: the engine does not take an option.
        ValueError: the engine refuses the value of an option.
    """
    engine_class = find_engine(name)
    arguments: dict[str, Any] = dict(options)
    if "gpus" not in signature(engine_class).parameters and arguments.keys() & set(DEVICE_OPTIONS):
        device = choose_device(membership(), options)
        arguments = {key: value for key, value in arguments.items() if key not in DEVICE_OPTIONS} | {"device": device}
    return engine_class(**arguments)
