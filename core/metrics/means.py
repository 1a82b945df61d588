"""Weighted means that stay on the device until they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import Computed, MetricUpdate

EVALUATIONS = ("validation", "test")
PHASES = ("train", *EVALUATIONS, "predict")


class Sum:
    """A weighted sum of scalars in float64: of numbers and CPU tensors by Python, of other tensors on their device.

    Attributes:
        reads: whether the last value was a scalar tensor on the CPU.
    """

    __slots__ = ("host", "on_device", "reads", "weight")

    def __init__(self, host: float = 0.0, weight: float = 0.0) -> None:
        self.host, self.reads = host, False
        self.weight: Any = weight  # a tensor where counts are on a device
        self.on_device: Tensor | None = None

    def add(self, name: str, value: Tensor | float, weight: float) -> None:
        self.reads = value.__class__ is Tensor and value.is_cpu and value.numel() == 1
        if self.reads:  # nearly always
            assert isinstance(value, Tensor)
            self.host += value.item() * weight
            self.weight += weight
            return
        check_scalar(name, value)
        if isinstance(value, Tensor) and not value.is_cpu:
            if self.on_device is None:  # continues a loaded sum without a wait for the device
                dtype = torch.float32 if value.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
                self.on_device = torch.zeros((), dtype=dtype, device=value.device).add_(self.host)
                self.host = 0.0
            self.on_device.add_(value.detach().reshape(()), alpha=weight)
        else:
            self.host += (value.item() if isinstance(value, Tensor) else float(value)) * weight
        self.weight += weight

    def state(self) -> list[float]:
        return [self.host + (0.0 if self.on_device is None else self.on_device.item()), float(self.weight)]


class Means:
    """Weighted running means by name. Adding never waits for the device; `read` waits once.

    Metric objects are stored here too and compute their value when it is read.

    Args:
        note: called with a line about each metric object whose value is not a number.

    Attributes:
        batch: the number of the current batch, if the values of an evaluation are kept by batch.
        weights: the total weight of each mean that was read last; metric objects have none.
        totals: (sum, weight) of everything that was read so far, by name.
        others: values of metric objects at the last read that are not numbers, by name.
    """

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        self.batch = 0
        self.others: dict[str, Any] = {}
        self.note = note
        self.weights: dict[str, float] = {}
        self.totals: dict[str, tuple[float, float]] = {}
        self._sums: dict[str, Sum] = {}
        self._objects: dict[str, Any] = {}
        self._idle: dict[str, Any] = {}  # objects that were read and reset
        self._saved: dict[str, Any] = {}  # loaded states of objects without an update since

    def add(self, name: str, value: Tensor | float | MetricUpdate, weight: float = 1.0) -> None:
        """Add a value (a scalar tensor or a number) with its weight; or update a metric object.

        Raises:
            TypeError: neither a number nor a tensor.
            ValueError: a tensor of more than one element.
        """
        entry = self._sums.get(name)
        if entry is None:
            if isinstance(value, MetricUpdate):
                self._update(name, value)
                return
            entry = self._sums[name] = Sum()
        entry.add(name, value, weight)  # type: ignore[arg-type]  # an object is never among the sums

    def add_sum(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        self.add(name, total)
        self._sums[name].weight += count - 1.0

    def settle(self, name: str, pending: list[tuple[Tensor, Any, bool]], stepped: bool) -> None:
        """Add the losses of a complete window if it was stepped, and clear the list.

        Args:
            name: of the mean.
            pending: (loss, weight, whether the loss is a sum) of each micro-batch.
            stepped: whether there was a step.
        """
        entry = self._sums.get(name)
        for loss, weight, is_sum in pending if stepped else ():
            if is_sum:
                self.add_sum(name, loss, weight)
            elif entry is not None and entry.reads and loss.is_cpu:  # as in the last step
                entry.host += loss.item() * weight
                entry.weight += weight
            else:
                self.add(name, loss, weight)
        pending.clear()

    def for_evaluation(self) -> Means:
        return Means(self.note)

    def state_dict(self) -> dict[str, Any]:
        state = {name: entry.state() for name, entry in self._sums.items()}
        if not self._objects:
            return {**state, **self._saved}
        from .metric_objects import object_state  # loaded with the first object

        return {**state, **self._saved, **{name: object_state(metric) for name, metric in self._objects.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # A metric object loads its state when it is next updated.
        sums = {name: saved for name, saved in state.items() if isinstance(saved, list)}
        self._sums = {name: Sum(*saved) for name, saved in sums.items()}
        self._objects, self._saved = {}, {name: saved for name, saved in state.items() if name not in sums}

    def sums(self) -> dict[str, tuple[float, float]]:
        sums = {name: entry.host for name, entry in self._sums.items()}
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, entry in self._sums.items():
            if entry.on_device is not None:
                by_device.setdefault(entry.on_device.device, {})[name] = entry.on_device
        for tensors in by_device.values():  # one wait for each device
            for name, value in zip(tensors, torch.stack([*tensors.values()]).tolist(), strict=True):
                sums[name] += value
        weights = {name: float(self._sums[name].weight) for name in sums}
        if wrong := [name for name, weight in weights.items() if weight != weight]:
            raise ValueError(f"The count of {wrong[0]!r} is negative or not a number, or it is 0 and the sum is not.")
        return {name: (value, weights[name]) for name, value in sums.items()}

    def read(self, scope: str) -> dict[str, float]:
        sums = self.sums()
        self.totals = added(self.totals, sums)
        metrics = {f"{scope}/{name}": value / weight for name, (value, weight) in sums.items() if weight}
        self.weights = {f"{scope}/{name}": weight for name, (_, weight) in sums.items() if weight}
        values, self.others = self.computed()
        metrics |= {f"{scope}/{name}": value for name, value in values.items()}
        if self.note is not None and self.others:
            from .metric_objects import describe_non_number  # loaded with the first object

            for name, value in self.others.items():
                self.note(describe_non_number(name, value))
        for metric in self._objects.values():
            metric.reset()
        self._idle |= self._objects
        self._sums, self._objects, self._saved = {}, {}, {}
        return metrics

    def computed(self) -> Computed:
        # Numbers first, then all other values, such as a confusion matrix. Several values are named `<name>/<key>`.
        if not self._objects:
            return {}, {}
        from .metric_objects import compute_values  # loaded with the first object

        return compute_values(self._objects)

    def _update(self, name: str, value: MetricUpdate) -> None:
        if (metric := self._objects.get(name)) is None:
            from .metric_objects import fresh_copy, load_object  # imported for the first update since a log

            metric = self._objects[name] = self._idle.pop(name, None) or fresh_copy(value.metric, value.outputs)
            if name in self._saved:
                load_object(metric, self._saved.pop(name))
        try:
            with torch.no_grad():
                metric.update(value.outputs, value.targets)
        except Exception as error:
            from .metric_objects import describe_metric  # imported after an error

            error.add_note(describe_metric(name, value.outputs, value.targets))
            raise


Totals = dict[str, tuple[float, float]]


def added(totals: Totals, more: Totals) -> Totals:
    result = dict(totals)
    for name, (value, weight) in more.items():
        value_before, weight_before = result.get(name, (0.0, 0.0))
        result[name] = value_before + value, weight_before + weight
    return result


def own_name(name: object, phase: str) -> str:
    """Return the name of a value within its phase: `loss` for `train/loss`.

    Raises:
        TypeError: it is not a string.
        ValueError: it is of another phase.
    """
    if not isinstance(name, str):
        raise TypeError(f"The name of a tracked value must be a string, such as 'loss'; got {name!r}.")
    split, _, short = name.partition("/")
    if short and (split == phase or {split, phase} == {*EVALUATIONS}):  # a test may run the validation step
        return short
    if split in PHASES:
        raise ValueError(f"{name!r} cannot be tracked in {phase}, where names are {phase}/<name>: track {short!r}.")
    return name


def reserved(name: str, phase: str) -> ValueError:
    owner = "the returned loss" if phase == "train" else f"a value that {phase}_step returns"
    return ValueError(f"The name {name!r} is reserved for {owner}: use another name in run.track({name!r}, ...).")


def check_scalar(name: str, value: Any) -> None:
    if not hasattr(value, "__float__"):
        raise TypeError(f"Metric {name!r} must be a number or a scalar tensor, got {value!r}.")
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"Metric {name!r} must be a scalar to be averaged, got a tensor of shape {list(value.shape)}.")
