"""The language between loop and plugins: events, the bus, control, progress, and what a handler is given."""

from .bus import Bus, Handle, Lane, OrderedSignal
from .catalogue import *  # noqa: F403  # an event is named where it is declared and where it is emitted, nowhere else
from .catalogue import CATALOGUE
from .control import Control, History, Request
from .engine import Engine
from .progress import Progress
from .run import Run

__all__ = [kind.__name__ for kind in CATALOGUE]
__all__ += ["CATALOGUE", "Bus", "Control", "Engine", "Event", "Handle", "History", "Lane", "OrderedSignal", "Progress", "Request", "Run"]  # fmt: skip  # noqa: E501, F405
