"""What the objects of another framework that a plugin calls keep over a resume: their states, a stop they asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from heliograph import Run

from .unsaved import Unsaved

PLAIN = (bool, int, float, str, type(None))


class OwnStates:
    """Saves and restores the states of objects, each under the name of its class, with a number where there are more.

    Args:
        owners: the objects; those without `state_dict` and `load_state_dict`, such as functions, have no state.
        remedy: how an object can be given a state, for a resume that lacks it.

    Attributes:
        names: of the objects.
        options: what each was made with, by `<object>.<name>`, as far as that is plain data and not in its state.
        stop_reason: why one of them has asked for a stop; empty where none has.
    """

    _saved_options: Mapping[str, Any]
    _lost: list[str]

    def __init__(self, owners: Sequence[Any], remedy: str) -> None:
        named = dict(zip(_names(owners), owners, strict=True))
        self.names, self._remedy = list(named), remedy
        self._kept = {name: each for name, each in named.items() if _has_state(each)}
        self._others = {name: Unsaved(each) for name, each in named.items() if name not in self._kept}
        self._first = self._save()
        self.options = {
            f"{name}.{key}": value
            for name, each in named.items()
            for key, value in getattr(each, "__dict__", {}).items()
            if key[0] != "_" and type(value) in PLAIN and key not in self._first.get(name, {})
        }
        self._forget()

    def reset(self) -> None:
        """Put every object that has a state back to what it was when it was registered."""
        self._load(self._first)
        self._forget()

    def resume(self, run: Run, *, affects_training: bool) -> None:
        """Ask again for a stop, unless other options have been given since; report state that no checkpoint holds."""
        if self._saved_options != self.options:
            self.stop_reason = ""
        if self.stop_reason:
            run.control.stop(self.stop_reason)
        if self._lost and affects_training and not run.report.is_replay:
            for path in self._lost:
                run.data.report_untracked(path, f"it had changed and starts fresh: {self._remedy}")

    def state_dict(self, run: Run | None) -> dict[str, Any]:
        """Return copies of all that is kept.

        Args:
            run: that which is under way, None outside of one. Its modules are not of an object that holds one, and a
                stop that somebody has withdrawn there is not asked for again.
        """
        modules = [] if run is None else list(run.modules.values())
        lost = [f"{name}.{each}" for name, other in self._others.items() for each in other.changed(modules)]
        stop = self.stop_reason if run is None or run.control.should_stop else ""
        return {"states": self._save(), "stop": stop, "options": dict(self.options), "lost": lost}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back; an object that is new keeps its own state."""
        self._load(state["states"])
        self.stop_reason, self._saved_options, self._lost = state["stop"], state["options"], state["lost"]

    def _save(self) -> dict[str, Any]:
        return {name: dict(deepcopy(each.state_dict())) for name, each in self._kept.items()}

    def _load(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            if name in self._kept:
                self._kept[name].load_state_dict(deepcopy(state))

    def _forget(self) -> None:
        self.stop_reason, self._saved_options, self._lost = "", {}, []


def _has_state(owner: Any) -> bool:
    return all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict"))


def _names(owners: Iterable[Any]) -> Iterable[str]:
    counts: dict[str, int] = {}
    for owner in owners:
        name = getattr(owner, "__name__", type(owner).__name__)
        counts[name] = number = counts.get(name, 0) + 1
        yield name if number == 1 else f"{name}_{number}"
