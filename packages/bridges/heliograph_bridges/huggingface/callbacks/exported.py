"""The state of a callback that is an `ExportableState` of the Trainer, in the way of modules and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from heliograph.spi import require


def stateful(callback: Any) -> Any:
    """Return what has the `state_dict` of a callback: itself, unless it is an `ExportableState`."""
    base = require("transformers.trainer_callback", "from_huggingface", extra="transformers").ExportableState
    return Exported(callback, base) if isinstance(callback, base) else callback


class Exported:
    """A callback with `state_dict` and `load_state_dict`; its public attributes are what the callback was made with.

    Args:
        callback: the callback.
        base: `transformers.trainer_callback.ExportableState`.
    """

    def __init__(self, callback: Any, base: Any) -> None:
        self._callback, self._base, self.__name__ = callback, base, type(callback).__name__
        self._args = deepcopy(self._part("args"))
        vars(self).update(self._args)

    def state_dict(self) -> dict[str, Any]:
        """Return what the callback says that it keeps: its attributes, if it has some, and changed arguments."""
        changed = {name: value for name, value in self._part("args").items() if value != self._args.get(name)}
        return {**self._part("attributes"), **changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back into the callback, which stays the object that it is."""
        kind, attributes = type(self._callback), dict(state)
        if "attributes" not in self._callback.state():  # all of its state is among its arguments
            attributes = {
                name: value for name, value in self._args.items() if hasattr(self._callback, name)
            } | attributes
        if kind.from_state.__func__ is not self._base.from_state.__func__:
            args = self._args | {name: state[name] for name in self._args.keys() & state.keys()}
            whole = {**self._callback.state(), "args": args}
            if "attributes" in whole:
                whole["attributes"] = {name: value for name, value in state.items() if name not in args}
            attributes = vars(kind.from_state(deepcopy(whole)))
        for name, value in attributes.items():
            setattr(self._callback, name, value)

    def _part(self, name: str) -> dict[str, Any]:
        return dict(self._callback.state().get(name, {}))
