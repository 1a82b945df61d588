"""What Lightning has measured, by our names: it keeps the metrics of all phases in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .names import our_name


class Measured:
    """Separates the metrics of a validation from those of the training."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._validated: dict[str, float] = {}

    def remember(self, metrics: Mapping[str, Any]) -> None:
        """Remember the metrics before a validation."""
        self._before = _numbers(metrics)

    def of_validation(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics of the validation that ends: those of its names, and others that are new or changed."""
        found = {}
        for name, value in _numbers(metrics).items():
            ours = our_name(name)
            is_plain = "/" not in ours
            if ours.startswith("validation/") or (is_plain and self._before.get(name) != value):
                found[our_name(name, "validation")] = value
                self._validated[name] = value
        return found

    def of_training(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics of the training: those that are not what the last validation has measured."""
        own = {name: value for name, value in _numbers(metrics).items() if self._validated.get(name) != value}
        named = {our_name(name, "train"): value for name, value in own.items()}
        return {name: value for name, value in named.items() if name.startswith("train/")}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
