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
        vars(self).update(callback.state()["args"])

    def state_dict(self) -> dict[str, Any]:
        """Return what the callback says that it keeps."""
        return dict(self._callback.state()["attributes"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back into the callback, which stays the object that it is."""
        kind, attributes = type(self._callback), state
        if kind.from_state.__func__ is not self._base.from_state.__func__:
            whole = {"args": self._callback.state()["args"], "attributes": dict(state)}
            attributes = vars(kind.from_state(deepcopy(whole)))
        for name, value in attributes.items():
            setattr(self._callback, name, value)
