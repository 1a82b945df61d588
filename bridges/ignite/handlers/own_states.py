"""The states of handlers: of those that have `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import nn

from ...unsaved import Unsaved

PLAIN = (bool, int, float, str, type(None))


class OwnStates:
    """Saves and restores the states of handlers, each under the name of its class, with a number where there are more.

    Args:
        handlers: the handlers; functions among them have no state.

    Attributes:
        handlers: the handlers.
        names: of them.
        options: what each was made with, by `<handler>.<name>`, as far as that is plain data and not in its state.
    """

    def __init__(self, handlers: Sequence[Any]) -> None:
        self.handlers = handlers
        named = dict(zip(_names(handlers), handlers, strict=True))
        self.names = list(named)
        self._kept = {name: each for name, each in named.items() if _has_state(each)}
        self._others = {name: Unsaved(each) for name, each in named.items() if name not in self._kept}
        self._first = self.save()
        self.options = {
            f"{name}.{key}": value
            for name, each in named.items()
            for key, value in getattr(each, "__dict__", {}).items()
            if key[0] != "_" and type(value) in PLAIN and key not in self._first.get(name, {})
        }

    def save(self) -> dict[str, Any]:
        """Return a copy of every state."""
        return {name: dict(deepcopy(each.state_dict())) for name, each in self._kept.items()}

    def load(self, states: Mapping[str, Any]) -> None:
        """Put states back; a handler that is new keeps its own."""
        for name, state in states.items():
            if name in self._kept:
                self._kept[name].load_state_dict(deepcopy(state))

    def reset(self) -> None:
        """Put every handler back to what it was when it was registered."""
        self.load(self._first)

    def unsaved(self, trained: Iterable[nn.Module]) -> list[str]:
        """Return what handlers without a state have changed, as `<handler>.<attribute>`."""
        modules = list(trained)
        return [f"{name}.{each}" for name, other in self._others.items() for each in other.changed(modules)]


def _has_state(handler: Any) -> bool:
    return all(callable(getattr(handler, name, None)) for name in ("state_dict", "load_state_dict"))


def _names(handlers: Iterable[Any]) -> Iterable[str]:
    counts: dict[str, int] = {}
    for handler in handlers:
        name = getattr(handler, "__name__", type(handler).__name__)
        counts[name] = number = counts.get(name, 0) + 1
        yield name if number == 1 else f"{name}_{number}"
