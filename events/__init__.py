"""The language between loop and plugins: events, the bus, control, progress, and what a handler is given."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .bus import Bus, Handle, Lane, OrderedSignal
from .catalogue import *  # noqa: F403  # an event is named where it is declared and where it is emitted, nowhere else
from .catalogue import CATALOGUE
from .control import Control, History, Request
from .progress import Progress

if TYPE_CHECKING:
    from .engine import Engine as Engine
    from .run import Run as Run

__all__ = [kind.__name__ for kind in CATALOGUE]
__all__ += ["CATALOGUE", "Bus", "Control", "Engine", "Event", "Handle", "History", "Lane", "OrderedSignal", "Progress", "Request", "Run"]  # fmt: skip  # noqa: E501, F405


def __getattr__(name: str) -> Any:
    """Import the protocols, which a run itself does not need, where they are asked for."""
    if name not in ("Engine", "Run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{name.lower()}", __name__), name)
