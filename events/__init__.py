"""The language between loop and plugins: events, the bus, control, progress, and what a handler is given."""

from .bus import Bus, Handle, Lane, OrderedSignal
from .catalogue import *  # noqa: F403  # an event is named in two places only: where it is declared and where emitted
from .control import Control, History, Request
from .engine import Engine
from .filters import At, Between, Every, Filter, Once
from .progress import Progress
from .run import Run

__all__ = [  # noqa: F405
    *(kind.__name__ for kind in CATALOGUE),  # noqa: F405
    "CATALOGUE", "At", "Between", "Bus", "Control", "Engine", "Event", "Every", "Filter", "Handle", "History", "Lane",
    "Once", "OrderedSignal", "Progress", "Request", "Run",
]  # fmt: skip
