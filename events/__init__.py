"""The language between loop and plugins: events, the bus, control, progress, and what a handler is given."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .bus import Bus, FunctionName, Handle, Lane, OrderedSignal, PluginName
from .catalogue import *  # noqa: F403  # an event is named where it is declared and where it is emitted, nowhere else
from .catalogue import CATALOGUE, Phase, Status
from .control import Control, History, Pending, Request, Verb
from .progress import Progress

if TYPE_CHECKING:
    from .alarms import Alarm as Alarm
    from .bus import Receiver as Receiver
    from .bus import Subscription as Subscription
    from .bus import current_owner as current_owner
    from .bus import is_within as is_within
    from .control import CHANGES as CHANGES
    from .engine import Engine as Engine
    from .engine import Reduction as Reduction
    from .payloads import LogCurve as LogCurve
    from .payloads import LogFile as LogFile
    from .payloads import LogHistogram as LogHistogram
    from .payloads import LogImage as LogImage
    from .payloads import LogText as LogText
    from .resume_facts import Position as Position
    from .resume_facts import ResumeFacts as ResumeFacts
    from .run import CheckpointSource as CheckpointSource
    from .run import Run as Run

__all__ = [kind.__name__ for kind in CATALOGUE]
__all__ += ["CATALOGUE", "CHANGES", "Alarm", "Bus", "CheckpointSource", "Control", "Engine", "Event", "FunctionName", "Handle", "History"]  # fmt: skip  # noqa: E501, F405
__all__ += ["Lane", "LogCurve", "LogFile", "LogHistogram", "LogImage", "LogText", "OrderedSignal", "Pending", "Phase", "PluginName", "Position", "Progress", "Receiver", "Reduction", "Request", "ResumeFacts", "Run", "Status", "Subscription", "Verb", "current_owner", "is_within"]  # fmt: skip  # noqa: E501

# Protocols and types that a run itself does not need: imported when they are first used.
_LAZY = {
    "alarms": ["Alarm"],
    "bus": ["Receiver", "Subscription", "current_owner", "is_within"],
    "control": ["CHANGES"],
    "engine": ["Engine", "Reduction"],
    "payloads": ["LogCurve", "LogFile", "LogHistogram", "LogImage", "LogText"],
    "resume_facts": ["Position", "ResumeFacts"],
    "run": ["CheckpointSource", "Run"],
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _LAZY.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)
