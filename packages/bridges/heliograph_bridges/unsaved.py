"""What an object without a state of its own changes in a training, so that no checkpoint holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from heliograph.spi import differing, encode
from torch import nn


class Unsaved:
    """The attributes of an object as they were, to be compared with what they have become.

    Args:
        holder: the object. Of what it refers to, objects of installed libraries are not looked into.
    """

    def __init__(self, holder: Any) -> None:
        self._holder, self._before = holder, _read(holder, ())
        self._changed: list[str] = []

    def changed(self, trained: Iterable[nn.Module]) -> list[str]:
        """Return the names of attributes that changed; once there are some, they are not looked for again.

        Args:
            trained: the modules of the run, which checkpoints hold.
        """
        if not self._changed:
            now = _read(self._holder, trained)
            before = {name: value for name, value in self._before.items() if name in now}
            self._changed = [name for name, _, _ in differing(before, now)]
        return self._changed


def _read(holder: Any, trained: Iterable[nn.Module]) -> Mapping[str, Any]:
    own = {id(each) for each in trained}
    return {name: _encode(value) for name, value in getattr(holder, "__dict__", {}).items() if id(value) not in own}


def _encode(value: Any) -> Mapping[str, Any]:
    return encode(value.state_dict() if isinstance(value, nn.Module) else value)
