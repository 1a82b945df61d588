"""Engines by name, of this package and of others, found through the entry-point group `heliograph.engines`."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, Unpack, cast

from ...plugins.discovery import Discovered, discover, find
from ..distributed.ranks.membership import membership
from .contract import LoopEngine
from .device_choice import DEVICE_OPTIONS, choose_device
from .options import EngineOptions

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
