"""Metrics of a run: values by name, running means, monitored metrics, logged rows, payloads for trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

Computed = tuple[dict[str, float], dict[str, Any]]  # numbers by name, and all other values by name


class Metrics(dict[str, float]):
    """Metric values by name, stored as Python floats for logs and checkpoints.

    Args:
        values: the initial values.

    Raises:
        TypeError: on assignment, if a value is not a number or a name is not a string.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.update(values or {})

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"The name of a metric is a string such as 'train/loss', got {name!r}.")
        super().__setitem__(name, _number(name, value))

    def update(self, *mappings: Any, **more: Any) -> None:
        """Set values from other mappings or keywords, as `dict.update` does."""
        for name, value in dict(*mappings, **more).items():
            self[name] = value

    def __ior__(self, values: Any) -> Self:  # type: ignore[misc, override]  # as update does
        self.update(values)
        return self


def is_metric_object(value: Any) -> bool:
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("update", "compute", "reset")
    )


class MetricUpdate:
    """The arguments for an update of a metric object: `update`, `compute` and `reset`, as in torchmetrics.

    Args:
        metric: the user's object. It is only copied; the copy is reset at each log and for each evaluation set.
        outputs: of the model.
        targets: of the batch.
    """

    __slots__ = ("metric", "outputs", "targets")

    def __init__(self, metric: Any, outputs: Any, targets: Any) -> None:
        self.metric, self.outputs, self.targets = metric, outputs, targets


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes | bytearray):  # float() would parse it
            raise TypeError
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        got = repr(value) if isinstance(value, str | bytes | None) else f"a value of type {type(value).__name__}"
        raise TypeError(f"The metric {name!r} must be a number or a tensor of one element, got {got}.") from None
