"""Datasets of other libraries, as loaders: found by the package that their class is of.

A package names its adapter in the entry-point group `heliograph.loaders`, under the name of the library's package.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

from ...plugins.discovery import find

GROUP = "heliograph.loaders"
PLAIN = ("builtins", "collections", "torch", "numpy", "__main__")  # packages whose objects have no adapter


class Adapter(Protocol):
    """What an entry point of the group names: an object, or a class with static methods."""

    def accepts(self, data: Any) -> bool:
        """Return whether this is a dataset of the library: something else may be a loader already."""

    def loader(self, dataset: Any, params: Mapping[str, Any] | None, split: str) -> Any:
        """Return a loader of a dataset, as `loader_params` say.

        Raises:
            TypeError: nothing says how to batch it.
            ValueError: a parameter is not for such a dataset.
        """


def adapter_of(data: Any) -> Adapter | None:
    """Return what makes a loader of somebody's dataset; None where no installed package does."""
    package = type(data).__module__.partition(".")[0]
    if package in PLAIN or package not in _packages():
        return None
    adapter = cast(Adapter, find(package, GROUP).load())
    return adapter if adapter.accepts(data) else None


@cache
def _packages() -> frozenset[str]:
    return frozenset(point.name for point in entry_points(group=GROUP))
