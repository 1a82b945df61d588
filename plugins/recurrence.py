"""What is asked for again and again: when, by a filter on absolute counters, and when it was last done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from ..events import Progress, Run
from ..events.checks import known_names
from .filters import COUNTERS, NO_COUNTERS, Every, Filter


def make_filter(name: str, when: Any, counter: Mapping[str, Any], *options: str) -> Filter:
    """Return a filter as it was given, or that of a counter such as `steps=100`.

    Args:
        name: of the class that is given it, for errors.
        when: the filter; None where there is a counter.
        counter: the arguments of `Every`.
        *options: the other keywords of the class.

    Raises:
        TypeError: neither is given, or both; a keyword is not known.
    """
    known = [*COUNTERS, *NO_COUNTERS, "after", *options]
    for unknown in counter.keys() - set(known):
        raise TypeError(f"{name} has no argument {unknown!r}.{known_names(unknown, known)}")
    if when is None and counter:
        return Every(**counter)
    if not isinstance(when, Filter) or counter:
        given = ", ".join([repr(when)] * (when is not None) + [f"{key}={value!r}" for key, value in counter.items()])
        raise TypeError(
            f"{name} takes an interval, as in {name}(steps=100), or a filter, as in {name}(At(steps=[10, 100])); got "
            f"{given or 'nothing'}."
        )
    return deepcopy(when)


class Recurrence:
    """A filter that says when something is due, and the moment at which it was last done; one run after another.

    Args:
        when: the filter, which belongs to this object then.

    Attributes:
        last: the moment at which it was last done, -1 where it was not.
    """

    def __init__(self, when: Filter) -> None:
        self._when, self.last = when, -1
        self._origin: Progress | None = None
        self._saved: Mapping[str, Any] | None = None

    def begin(self, run: Run) -> None:
        """Forget the former run; ValueError where the filter does not fit this one."""
        self._when.plan(run)
        self.last, self._origin, self._saved = -1, run.origin, None

    def resume(self, run: Run, moment: Callable[[Progress], int]) -> None:
        """Continue from what was saved, or from where the run is, as `moment` counts."""
        self._when.plan(run)
        self._origin = run.origin
        self.last = moment(run.origin) if self._saved is None else self._saved["last"]
        self._when.load_state_dict(run.origin, {} if self._saved is None else self._saved["filter"])
        self._saved = None

    def state_dict(self) -> dict[str, Any]:
        """Return when it was last done, and what is due next."""
        if self._saved is not None:  # not taken over yet
            return dict(self._saved)
        return {} if self._origin is None else {"last": self.last, "filter": self._when.state_dict(self._origin)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the run has its new origin."""
        self._saved = state or None
