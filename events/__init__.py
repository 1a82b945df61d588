"""The language between loop and plugins: events, the bus, control, progress, and what a handler is given."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .bus import (
    Bus,
    FunctionName,
    Handle,
    Lane,
    OrderedSignal,
    PluginName,
    Receiver,
    Subscription,
    current_owner,
    is_within,
)
from .catalogue import *  # noqa: F403  # an event is named where it is declared and where it is emitted, nowhere else
from .catalogue import CATALOGUE, Phase, Status
from .control import CHANGES, Control, History, Pending, Request, Verb
from .progress import Position, Progress, Rates, ResumeFacts

if TYPE_CHECKING:
    from .alarms import Alarm as Alarm
    from .run import CheckpointSource as CheckpointSource
    from .run import Engine as Engine
    from .run import Reduction as Reduction
    from .run import Run as Run

__all__ = [kind.__name__ for kind in CATALOGUE]
__all__ += ["CATALOGUE", "CHANGES", "Alarm", "Bus", "CheckpointSource", "Control", "Engine", "Event", "FunctionName", "Handle", "History"]  # fmt: skip  # noqa: E501, F405
__all__ += ["Lane", "LogCurve", "LogFile", "LogHistogram", "LogImage", "LogText", "OrderedSignal", "Pending", "Phase", "PluginName", "Position", "Progress", "Rates", "Receiver", "Reduction", "Request", "ResumeFacts", "Run", "Status", "Subscription", "Verb", "current_owner", "is_within"]  # fmt: skip  # noqa: E501, F405

# Protocols that a run itself does not need: imported when they are first used.
_LAZY = {"Alarm": "alarms", "CheckpointSource": "run", "Engine": "run", "Reduction": "run", "Run": "run"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
