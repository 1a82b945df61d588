"""Which engine a run gets: by what is asked for, what the machine has, and how the process was started."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch

from ...events.checks import known_names
from ..distributed.ranks.membership import Membership, membership
from .device import DeviceEngine
from .precision import PrecisionName

if TYPE_CHECKING:
    from .contract import LoopEngine

PLACE = ("device", "gpus", "use_cpu")  # of the options below, those that say where


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


def made_engine(engine: LoopEngine | str | None, options: EngineOptions) -> LoopEngine:
    """Return an engine as it is, by its name, or the one that suits.

    Raises:
        TypeError: there is no such option, or the engine is none.
        ValueError: an engine object comes with options; also what the choice refuses.
    """
    if unknown := sorted(options.keys() - EngineOptions.__annotations__.keys()):
        raise TypeError(f"There is no option {unknown[0]!r}.{known_names(unknown[0], EngineOptions.__annotations__)}")
    if engine is None:
        return choose_engine(**options)
    if isinstance(engine, str):
        return named_engine(engine, **options)
    if options:
        names = ", ".join(f"{name}=" for name in options)
        raise ValueError(
            f"Give {names} or engine=, not both: an engine is told when it is made, {type(engine).__name__}(...)."
        )
    if isinstance(engine, type) or not callable(getattr(engine, "process", None)):
        given = f"the class {engine.__name__}" if isinstance(engine, type) else repr(engine)
        raise TypeError(f"engine= takes an engine object or the name of one: DDPEngine() or 'ddp', say; got {given}.")
    return engine


def choose_engine(**options: Unpack[EngineOptions]) -> LoopEngine:
    """Return an engine: `DDPEngine` in a process that was started with others, else `DeviceEngine`.

    Each process gets one device: the CPU, or one GPU. No process is ever started from here.

    Args:
        **options: see `EngineOptions`.

    Raises:
        RuntimeError: a GPU is wanted, and there is none.
        TypeError: there is no such option, or one is of the wrong type.
        ValueError: options contradict each other, or the device, or what the machine has.
    """
    member = membership()
    device = device_for(member, options)
    rest: dict[str, Any] = {name: value for name, value in options.items() if name not in PLACE}
    if member.world_size > 1:
        from .parallel.ddp import DDPEngine

        return DDPEngine(device=device, **rest)
    return DeviceEngine(device, **rest)


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
    from .entry_points import find_engine

    kind = find_engine(name)
    taken = signature(kind).parameters
    given: dict[str, Any] = dict(options)
    if "device" in taken and not taken.keys() & {"gpus", "use_cpu"} and given.keys() & set(PLACE):
        device = device_for(membership(), options)
        given = {each: value for each, value in given.items() if each not in PLACE} | {"device": device}
    open_ended = any(each.kind is Parameter.VAR_KEYWORD for each in taken.values())
    if not open_ended and (unknown := sorted(given.keys() - taken.keys())):
        known = ", ".join(f"{each}=" for each in taken if each in EngineOptions.__annotations__)
        raise ValueError(
            f"The engine {name!r} takes no {unknown[0]}=. Of the trainer's options it takes {known or 'none'}; what is "
            f"its own goes to the engine itself: Trainer(engine={getattr(kind, '__name__', name)}(...))."
        )
    return kind(**given)


def device_for(member: Membership, options: EngineOptions) -> str | torch.device | None:
    """Return the device that this process is to use, None for the engine's own choice.

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
            "nvidia-smi and torch.version.cuda tell why one is missed."
        )
    return device


def _gpu_for(member: Membership, gpus: Sequence[int]) -> torch.device:
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"gpus={gpus!r} wants CUDA, but torch sees no CUDA device. Leave gpus out to take what there is (an Apple "
            f"GPU is device='mps'); nvidia-smi and torch.version.cuda tell why one is missed."
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
