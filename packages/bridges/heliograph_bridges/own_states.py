"""The states of other frameworks' objects over a resume, and their requests to stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from heliograph import NotRecorded, Run
from heliograph.spi import differing, encode
from torch import nn

PLAIN = (bool, int, float, str, type(None))


def refuse_replay(run: Run) -> None:
    if run.report.is_replay:
        raise NotRecorded("the model and the loaders, which callbacks of other frameworks receive")


class OwnStates:
    """Saves and restores the states of objects by class name, with a number for duplicates.

    Args:
        owners: the objects; without `state_dict` and `load_state_dict` they have no state.
        remedy: how to add a state, for the message about a resume without it.

    Attributes:
        names: the names of the objects.
        options: their plain attributes at creation that are not in their states, by `<object>.<name>`.
        stop_reason: the reason of a requested stop; empty without.
    """

    def __init__(self, owners: Sequence[Any], remedy: str) -> None:
        named = dict(zip(_names(owners), owners, strict=True))
        self.names, self._remedy = list(named), remedy
        self._stateful = {name: owner for name, owner in named.items() if _has_state(owner)}
        self._stateless = {name: Unsaved(owner) for name, owner in named.items() if name not in self._stateful}
        states = self._save()
        self.options = {
            f"{name}.{key}": value
            for name, owner in named.items()
            for key, value in getattr(owner, "__dict__", {}).items()
            if key[0] != "_" and type(value) in PLAIN and key not in states.get(name, {})
        }
        self._first = {"states": states, "stop": "", "options": self.options, "lost": []}
        self.stop_reason, self._saved_options, self._lost = "", self.options, list[str]()

    def reset(self) -> None:
        self.load_state_dict(self._first)

    def resume(self, run: Run, *, affects_training: bool) -> None:
        if self._saved_options != self.options:
            self.stop_reason = ""
        if self.stop_reason:
            run.control.stop(self.stop_reason)
        for path in self._lost if affects_training else ():
            run.data.report_untracked(path, f"it had changed and starts fresh: {self._remedy}")

    def state_dict(self, run: Run | None) -> dict[str, Any]:
        """Return copies of the states; a stop that was withdrawn in the current run is not repeated."""
        modules = [] if run is None else list(run.modules.values())
        lost = [
            f"{name}.{attribute}" for name, tracker in self._stateless.items() for attribute in tracker.changed(modules)
        ]
        stop = self.stop_reason if run is None or run.control.should_stop else ""
        return {"states": self._save(), "stop": stop, "options": dict(self.options), "lost": lost}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, owner in self._stateful.items():
            if name in state["states"]:
                owner.load_state_dict(deepcopy(state["states"][name]))
        self.stop_reason, self._saved_options, self._lost = state["stop"], state["options"], state["lost"]

    def _save(self) -> dict[str, Any]:
        return {name: dict(deepcopy(owner.state_dict())) for name, owner in self._stateful.items()}


def _has_state(owner: Any) -> bool:
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def _names(owners: Iterable[Any]) -> Iterable[str]:
    counts = Counter[str]()
    for owner in owners:
        name = getattr(owner, "__name__", type(owner).__name__)
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name}_{counts[name]}"


class Unsaved:
    """Detects attributes of an object that changed in a training but are in no checkpoint.

    Args:
        holder: the object; objects of installed libraries in its attributes are not searched.
    """

    def __init__(self, holder: Any) -> None:
        self._holder, self._before = holder, _read(holder, ())
        self._changed: list[str] = []

    def changed(self, trained: Iterable[nn.Module]) -> list[str]:
        if not self._changed:
            now = _read(self._holder, trained)
            before = {name: value for name, value in self._before.items() if name in now}
            self._changed = [name for name, _, _ in differing(before, now)]
        return self._changed


def _read(holder: Any, trained: Iterable[nn.Module]) -> Mapping[str, Any]:
    trained_ids = {id(module) for module in trained}
    return {
        name: encode(value.state_dict() if isinstance(value, nn.Module) else value)
        for name, value in getattr(holder, "__dict__", {}).items()
        if id(value) not in trained_ids
    }
