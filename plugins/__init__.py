"""How code listens to events: `Plugin`, `@on`, the manager, discovery."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .manager import Plugins

if TYPE_CHECKING:
    from .discovery import Discovered as Discovered
    from .discovery import discover as discover
    from .plugin import Plugin as Plugin
    from .plugin import Policy as Policy
    from .plugin import marked_methods as marked_methods
    from .plugin import on as on
    from .plugin import snake_case as snake_case

# Imported on first use: a training without plugins does not need them.
_HOMES = {"Discovered": "discovery", "discover": "discovery"}
_HOMES |= dict.fromkeys(("Plugin", "Policy", "marked_methods", "on", "snake_case"), "plugin")

__all__ = ["Discovered", "Plugin", "Plugins", "Policy", "discover", "marked_methods", "on", "snake_case"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
