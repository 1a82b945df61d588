"""A list of plugins that can be printed."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from ...plugins.plugin import snake_case


class PluginList(list[Any]):
    """A list of plugins whose text has a line for each: its name, and what it does.

    Args:
        plugins: the plugins.
        words: plugins, each with what it does; of others, the docstring of the class says it.
    """

    def __init__(self, plugins: Iterable[Any], words: Iterable[tuple[Any, str]]) -> None:
        super().__init__(plugins)
        self._words = list(words)

    def __repr__(self) -> str:
        names = [name_of(each) for each in self]
        width = max(map(len, names), default=0)
        return "\n".join(f"{name:<{width}}  {self._what(each)}" for name, each in zip(names, self, strict=True))

    def _what(self, plugin: Any) -> str:
        own = inspect.cleandoc(type(plugin).__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        return next((words for each, words in self._words if each is plugin), own or type(plugin).__name__)


def name_of(plugin: Any) -> str:
    """Return the name under which an object would be registered."""
    own = getattr(plugin, "name", None)
    return own if isinstance(own, str) else snake_case(type(plugin).__name__)
