"""Engines by name, of this package and of others, found through the entry-point group `heliograph.engines`."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ...plugins.discovery import Discovered, discover, find
from .contract import LoopEngine

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
