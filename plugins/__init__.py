"""How something listens: the `Plugin` base, the `@on` mark, the manager, discovery."""

from typing import TYPE_CHECKING, Any

from .manager import Plugins
from .marks import on
from .plugin import Plugin, Policy

if TYPE_CHECKING:
    from .discovery import Discovered as Discovered
    from .discovery import discover as discover

__all__ = ["Discovered", "Plugin", "Plugins", "Policy", "discover", "on"]


def __getattr__(name: str) -> Any:
    """Import what finds installed plugins where it is asked for."""
    if name not in ("Discovered", "discover"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import discovery

    return getattr(discovery, name)
