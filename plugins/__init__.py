"""How something listens: the `Plugin` base, the `@on` mark, the manager, discovery."""

from .discovery import Discovered, discover
from .manager import Plugins
from .marks import on
from .plugin import Plugin, Policy

__all__ = ["Discovered", "Plugin", "Plugins", "Policy", "discover", "on"]
