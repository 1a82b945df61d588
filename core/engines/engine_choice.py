"""The choice of the engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Unpack

import torch.distributed as dist

from ...events.checks import known_names
from .device import DeviceEngine
from .options import EngineOptions

if TYPE_CHECKING:
    from .contract import LoopEngine

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def make_engine(engine: LoopEngine | str | None, options: EngineOptions) -> LoopEngine:
    """Return the engine object itself, the engine of a name, or the one for this process.

    Raises:
        TypeError: an option or the engine is not valid.
        ValueError: an engine object comes with options, or the choice refuses the options.
    """
    if unknown := sorted(options.keys() - EngineOptions.__annotations__.keys()):
        from ...plugins.providers import hint

        tail = hint(unknown[0]) or known_names(unknown[0], EngineOptions.__annotations__)
        raise TypeError(f"Trainer has no option {unknown[0]!r}.{tail}")
    if engine is None:
        return choose_engine(**options)
    if isinstance(engine, str):
        from .device_choice import named_engine

        return named_engine(engine, **options)
    if options:
        names = ", ".join(f"{name}=" for name in options)
        raise ValueError(
            f"Give {names} or engine=, not both: an engine has its own options, {type(engine).__name__}(...)."
        )
    if isinstance(engine, type) or not callable(getattr(engine, "process", None)):
        value = f"the class {engine.__name__}" if isinstance(engine, type) else repr(engine)
        raise TypeError(f"engine= takes an engine object or its name, such as DDPEngine() or 'ddp'; got {value}.")
    return engine


def choose_engine(**options: Unpack[EngineOptions]) -> LoopEngine:
    """Return an engine: `DDPEngine` in a process that was started with others, else `DeviceEngine`.

    Each process gets one device, the CPU or one GPU. This function never starts a process.

    Args:
        **options: see `EngineOptions`.

    Raises:
        RuntimeError: a GPU is requested, but there is none.
        TypeError: there is no such option, or one has the wrong type.
        ValueError: options contradict each other, the device or the machine.
    """
    is_alone = not dist.is_initialized() and not any(name in os.environ for name in RANK_VARIABLES)
    if is_alone and not options.keys() & {"gpus", "use_cpu"}:
        return DeviceEngine(**options)  # type: ignore[misc]  # it takes all but these two
    from ..distributed.membership import membership
    from .device_choice import DEVICE_OPTIONS, choose_device

    member = membership()
    device = choose_device(member, options)
    compute_options: dict[str, Any] = {name: value for name, value in options.items() if name not in DEVICE_OPTIONS}
    if member.world_size > 1:
        from .ddp import DDPEngine

        return DDPEngine(device=device, **compute_options)
    return DeviceEngine(device, **compute_options)
