"""The state of a callback: what it says itself, in one of two ways, else nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from ....core.system.extras import require
from ...unsaved import Unsaved

PLAIN = (bool, int, float, str, type(None))


class OwnState:
    """Saves and restores what a callback keeps: by `state()` of `ExportableState`, or by a `state_dict()`.

    Attributes:
        options: what the callback was made with, as far as that is plain data, by `<class>.<name>`.
        is_kept: whether the callback has a state that is saved.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._base = require("transformers.trainer_callback", "from_huggingface", extra="transformers").ExportableState
        self._exports = isinstance(callback, self._base)
        has_both = all(callable(getattr(callback, name, None)) for name in ("state_dict", "load_state_dict"))
        self.is_kept = self._exports or has_both
        self._first = self.save()
        self._unsaved = None if self.is_kept else Unsaved(callback)
        given = callback.state()["args"] if self._exports else vars(callback)
        self.options = {
            f"{type(callback).__name__}.{name}": value
            for name, value in given.items()
            if name[0] != "_" and type(value) in PLAIN
        }

    def save(self) -> dict[str, Any]:
        """Return a copy of the state; empty where the callback says nothing of one."""
        if not self.is_kept:
            return {}
        return dict(deepcopy(self._callback.state()["attributes"] if self._exports else self._callback.state_dict()))

    def load(self, state: Mapping[str, Any]) -> None:
        """Put a state back into the callback, which stays the object that it is."""
        if not self.is_kept:
            return
        if not self._exports:
            self._callback.load_state_dict(deepcopy(state))
            return
        kind, attributes = type(self._callback), deepcopy(dict(state))
        if kind.from_state.__func__ is not self._base.from_state.__func__:
            args = self._callback.state()["args"]
            attributes = vars(kind.from_state({"args": args, "attributes": attributes}))
        for name, value in attributes.items():
            setattr(self._callback, name, value)

    def reset(self) -> None:
        """Put the callback back to what it was when it was registered, where it has a state."""
        self.load(self._first)

    def unsaved(self, trained: Iterable[nn.Module]) -> list[str]:
        """Return the attributes that a callback without a state has changed."""
        return [] if self._unsaved is None else self._unsaved.changed(trained)
