"""Which device a process gets, where GPUs are named or several processes train together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, Unpack, cast

import torch

from ....plugins.discovery import Discovered, discover, find
from ...distributed.ranks.membership import Membership, membership
from ..contract import LoopEngine
from ..options import EngineOptions

DEVICE_OPTIONS = ("device", "gpus", "use_cpu")


def choose_device(member: Membership, options: EngineOptions) -> str | torch.device | None:
    """Return the device that this process uses, None for the engine's own choice.

    Raises:
        RuntimeError: a GPU is wanted, and there is none.
        TypeError: `gpus` is not a list of numbers.
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
    from ..parallel.data_parallel import check_gpus

    chosen = check_gpus(gpus)
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


GROUP = "heliograph.engines"


def engines() -> list[Discovered]:
    """Return every installed engine, sorted by name; nothing is imported."""
    return discover(GROUP)


def find_engine(name: str) -> Callable[..., LoopEngine]:
    """Import the engine class of a name, such as `ddp`; `package:name` chooses where two packages use one.

    Raises:
        ImportError: it cannot be imported; says which package is broken and why.
        LookupError: none has this name, or several have.
    """
    return cast(Callable[..., LoopEngine], find(name, GROUP).load())


def named_engine(name: str, **options: Unpack[EngineOptions]) -> LoopEngine:
    """Return an engine by its name in the entry-point group `heliograph.engines`.

    Args:
        name: such as `ddp`.
        **options: see `EngineOptions`; where the engine takes a device, but neither `gpus` nor `use_cpu`, these choose
            its device.

    Raises:
        ImportError: it cannot be imported.
        LookupError: no engine has this name, or several have.
        ValueError: the engine does not take an option; also what it refuses itself.
    """
    kind = find_engine(name)
    taken = signature(kind).parameters
    given: dict[str, Any] = dict(options)
    if "device" in taken and not taken.keys() & {"gpus", "use_cpu"} and given.keys() & set(DEVICE_OPTIONS):
        device = choose_device(membership(), options)
        given = {each: value for each, value in given.items() if each not in DEVICE_OPTIONS} | {"device": device}
    open_ended = any(each.kind is Parameter.VAR_KEYWORD for each in taken.values())
    if not open_ended and (unknown := sorted(given.keys() - taken.keys())):
        known = ", ".join(f"{each}=" for each in taken if each in EngineOptions.__annotations__)
        raise ValueError(
            f"The engine {name!r} takes no {unknown[0]}=. Of the trainer's options it takes {known or 'none'}; what is "
            f"its own goes to the engine itself: Trainer(engine={getattr(kind, '__name__', name)}(...))."
        )
    return kind(**given)
