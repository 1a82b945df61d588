"""The values of the metrics of one run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from heliograph import Run
from heliograph.events import Event

from .base import RuleMetric

PLAIN: tuple[type[Any], ...] = (bool, int, float, str)


class Table:
    """Every metric with its newest value, from event to event.

    Args:
        metrics: by their names, made for this run.
    """

    def __init__(self, metrics: Mapping[str, RuleMetric]) -> None:
        self.metrics = metrics
        self.values: dict[str, Any] = dict.fromkeys(metrics)
        self._brought: dict[type[Event], list[str]] = {}
        for name, metric in metrics.items():
            for kind in metric.events:
                self._brought.setdefault(kind, []).append(name)

    def at(self, run: Run, event: Event) -> Values:
        """Return the values at an event, its new ones computed."""
        values = Values(self, run, event)
        for name in self._brought.get(type(event), ()):
            values.compute(name)
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics' states and, of those that cannot be computed at any time, the values."""
        return {
            name: {
                "kind": type(metric).__name__,
                "state": metric.state_dict(),
                "value": None if metric.when_read else plain(self.values[name]),
            }
            for name, metric in self.metrics.items()
        }

    def load(self, name: str, state: Mapping[str, Any]) -> None:
        """Continue with one metric."""
        self.metrics[name].load_state_dict(state["state"])
        self.values[name] = state["value"]


class Values(Mapping[str, Any]):
    """The values at one event; that of a metric which can be asked at any time is computed when it is first read."""

    def __init__(self, table: Table, run: Run, event: Event) -> None:
        self._table, self._run, self._event = table, run, event
        self._computed: set[str] = set()

    def compute(self, name: str) -> None:
        """Compute a metric again."""
        metric = self._table.metrics[name]
        self._computed.add(name)
        try:
            self._table.values[name] = metric.compute(self._run, self._event)
        except Exception as error:
            error.add_note(f"heliograph: in metric {name!r} ({type(metric).__name__}) of the rules")
            raise

    def __getitem__(self, name: str) -> Any:
        if name not in self._computed and self._table.metrics[name].when_read:
            self.compute(name)
        return self._table.values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.metrics)

    def __len__(self) -> int:
        return len(self._table.metrics)


def plain(value: Any) -> Any:
    """Return a value as plain types, for a checkpoint; None where it has no such form."""
    try:
        return _plain(value)
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    for kind in PLAIN:
        if isinstance(value, kind):  # NumPy's are of these kinds too, but a checkpoint does not hold them
            return kind(value)
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_plain(item) for item in value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of NumPy's, or of torch
        return _plain(value.item())
    raise TypeError(f"{type(value).__name__} is not a plain type")
