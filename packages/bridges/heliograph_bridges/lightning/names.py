"""Metric names: Lightning's `val_loss` is `validation/loss`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from heliograph import Run
from heliograph.spi import known_names

_PHASES = {"train": "train", "training": "train", "test": "test"} | dict.fromkeys(
    ("val", "valid", "validation"), "validation"
)
_SPELLED = re.compile(f"({'|'.join(_PHASES)})[_/](.+)")


def our_name(name: str, phase: str = "") -> str:
    """Return our name of a metric.

    A phase before `_` or `/` becomes a prefix: `val_loss`, `val/loss` and `validation_loss` are `validation/loss`.
    Other names get the prefix of the given phase.
    """
    if match := _SPELLED.fullmatch(name):
        spelled, metric = match.groups()
        if phase in ("", _PHASES[spelled]):
            return f"{_PHASES[spelled]}/{metric}"
    return f"{phase}/{name}" if phase else name


class MetricNames(MutableMapping[str, Any]):
    """The metrics of a run as tensors, by our names or Lightning's.

    Attributes:
        measured: the metrics of the current event, before the run has them.
        waiting: logged values for the next `Log`.
        unlogged: the names of values logged since the last `Log`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.measured: dict[str, float] | None = None
        self.waiting: dict[str, Any] = {}
        self.unlogged: set[str] = set()
        self._latest: dict[str, Any] = {}
        self._aliases: dict[str, str] = {}

    def __getitem__(self, name: str) -> Any:
        for key in (name, self._aliases.get(name, name), our_name(name)):
            for source in self._sources():
                if key in source:
                    value = source[key]
                    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        raise KeyError(f"Unknown metric {name!r}.{known_names(our_name(name), self)}")

    def __setitem__(self, name: str, value: Any) -> None:
        self._latest[name] = value

    def __delitem__(self, name: str) -> None:
        del self._latest[name]

    def __iter__(self) -> Iterator[str]:
        return iter({name: None for source in self._sources() for name in source})

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return dict(self)

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def forget(self) -> None:
        self._latest.clear()
        self.waiting.clear()
        self.unlogged.clear()

    def keep(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self._note(name, key := our_name(name, "train"), value)
            self.waiting[key] = value

    def log(self, name: str, value: Any, phase: str, weight: float) -> None:
        value = value.detach() if isinstance(value, torch.Tensor) else value
        key = our_name(name, phase)
        if self.measured is not None and phase == "train":
            self.keep({name: value})
        elif self.measured is not None:
            self._aliases[name] = key
            self.measured[key] = float(value)
        else:
            self._run.track(key.partition("/")[2], value, weight)
            self._aliases[name] = key
            if phase == "train":
                self._note(name, key, value)

    def add_to(self, metrics: dict[str, float]) -> None:
        metrics.update({name: float(value) for name, value in self.waiting.items()})
        self.waiting.clear()
        self.unlogged.clear()
        for name in self._latest.keys() & metrics.keys():
            del self._latest[name]

    def _note(self, name: str, key: str, value: Any) -> None:
        self._aliases[name] = key
        self._latest[key] = value
        self.unlogged.add(key)

    def _sources(self) -> Iterator[Mapping[str, Any]]:
        yield from (self.measured or {}, self._latest, self._run.metrics)
