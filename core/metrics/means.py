"""Metrics: weighted means that stay on the device until they are read, and metric objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..system.extras import kind_of
from . import is_metric_object

Computed = tuple[dict[str, float], dict[str, Any]]  # numbers by name, and all other values by name


def named_metrics(metrics: Any) -> dict[str, Any]:
    """Return metrics by name; a metric collection, which names its metrics itself, has the empty name.

    Raises:
        TypeError: they are not metrics.
        ValueError: a metric is called `loss`.
    """
    if not isinstance(metrics, Mapping) and not (is_metric_object(metrics) and hasattr(metrics, "keys")):
        raise TypeError(f"metrics= takes a dict, {{'accuracy': accuracy}}, or a MetricCollection; got {metrics!r}.")
    if "loss" in [*metrics.keys()]:
        raise ValueError("A metric cannot be called 'loss': that name is reserved for the loss.")
    named = dict(metrics) if isinstance(metrics, Mapping) else {"": metrics}
    for name, metric in named.items():
        if isinstance(metric, type) or not (callable(metric) or is_metric_object(metric)):
            raise TypeError(
                f"Metric {name!r} is a function of (outputs, targets), or an object with update; got {metric!r}."
            )
    return named


def measure(metrics: Mapping[str, Any], outputs: Any, targets: Any) -> Iterator[tuple[str, Any]]:
    # A metric object is not updated here: it yields the arguments of the update.
    outputs = detached(outputs)
    for name, metric in metrics.items():
        try:
            is_object = hasattr(metric, "compute") and is_metric_object(metric)
            value = MetricUpdate(metric, outputs, targets) if is_object else metric(outputs, targets)
        except Exception as error:
            error.add_note(describe_metric(name, outputs, targets))
            raise
        yield name, value


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


def fresh_copy(metric: Any, outputs: Any = None) -> Any:
    fresh = deepcopy(metric)
    if isinstance(fresh, nn.Module) and (device := _device_of(outputs)) is not None:
        fresh.to(device)
    fresh.reset()
    return fresh


def _device_of(outputs: Any) -> torch.device | None:
    if isinstance(outputs, Tensor):
        return outputs.device
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, list | tuple) else ()
    return next((device for part in parts if (device := _device_of(part)) is not None), None)


def detached(outputs: Any) -> Any:
    return for_tensors(Tensor.detach, outputs)


def for_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    # Other objects than tensors are not copied.
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        changed = copy(value)
        for name, part in value.items():
            changed[name] = for_tensors(function, part)
        return changed
    if not isinstance(value, list | tuple):
        return value
    make = getattr(value, "_make", type(value))
    return make(for_tensors(function, part) for part in value)


def compute_values(objects: Mapping[str, Any]) -> Computed:
    computed: dict[str, Any] = {}
    for name, metric in objects.items():
        value = metric.compute()
        if isinstance(value, Mapping):
            computed |= {f"{name}/{key}" if name else str(key): part for key, part in value.items()}
        else:
            computed[name] = value
    non_numbers = {name: for_tensors(Tensor.cpu, value) for name, value in computed.items() if not _is_number(value)}
    return {name: float(value) for name, value in computed.items() if name not in non_numbers}, non_numbers


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else hasattr(value, "__float__")


def describe_non_number(name: str, value: Any) -> str:
    kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
    return (
        f"the metric {name!r} is {kind}, not a number, so it is not logged. Read run.collected[{name!r}] when a "
        f"validation or test ends. For a number per class, wrap it, for example in torchmetrics' ClasswiseWrapper"
    )


def describe_metric(name: str, outputs: Any, targets: Any) -> str:
    values = (outputs, targets)
    shapes = [str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__ for value in values]
    return f"heliograph: in the metric {name!r}, with outputs of {shapes[0]} and targets of {shapes[1]}"


def object_state(metric: Any) -> dict[str, Any]:
    """Return the state of a metric object for a checkpoint.

    It is the object's own `state_dict`. For torchmetrics, whose state dict is empty, it is the accumulated states; for
    other objects the attributes, if all are plain types and tensors. Otherwise it is empty, and the next log covers
    only what follows the resume.
    """
    if isinstance(metric, nn.Module):
        parts = {path: part for path, part in metric.named_modules() if hasattr(part, "_defaults")}
        names = {path: (*part._defaults, "_update_count") for path, part in parts.items()}
        return {
            f"{path}.{name}": getattr(parts[path], name, 0) for path, attributes in names.items() for name in attributes
        }
    if callable(getattr(metric, "load_state_dict", None)):
        return dict(metric.state_dict())
    state = dict(vars(metric))
    return state if is_plain(state) else {}


def load_object(metric: Any, state: Mapping[str, Any]) -> None:
    copied = deepcopy(dict(state))
    if callable(getattr(metric, "load_state_dict", None)) and not isinstance(metric, nn.Module):
        metric.load_state_dict(copied)
        return
    for name, value in copied.items():
        path, _, attribute = name.rpartition(".")
        setattr(metric.get_submodule(path) if isinstance(metric, nn.Module) else metric, attribute, value)


def is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(is_plain(item) for item in value)
    if type(value) is dict:
        return all(is_plain(item) for pair in value.items() for item in pair)
    return type(value) in (bool, int, float, str, bytes, type(None), Tensor)


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
        objects = {name: object_state(metric) for name, metric in self._objects.items()}
        return {**{name: entry.state() for name, entry in self._sums.items()}, **self._saved, **objects}

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
        if self.note is not None:
            for name, value in self.others.items():
                self.note(describe_non_number(name, value))
        for metric in self._objects.values():
            metric.reset()
        self._idle |= self._objects
        self._sums, self._objects, self._saved = {}, {}, {}
        return metrics

    def computed(self) -> Computed:
        # Numbers first, then all other values, such as a confusion matrix. Several values are named `<name>/<key>`.
        return compute_values(self._objects)

    def _update(self, name: str, value: MetricUpdate) -> None:
        if (metric := self._objects.get(name)) is None:
            metric = self._objects[name] = self._idle.pop(name, None) or fresh_copy(value.metric, value.outputs)
            if name in self._saved:
                load_object(metric, self._saved.pop(name))
        try:
            with torch.no_grad():
                metric.update(value.outputs, value.targets)
        except Exception as error:
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


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the fraction of samples whose largest output is the target class.

    Args:
        outputs: scores, (batch, classes).
        targets: class indices, (batch,) or (batch, 1); or probabilities, (batch, classes), as from `Mixup`: the class
            with the largest probability is the target.

    Returns:
        A scalar tensor.

    Raises:
        ValueError: the outputs or the targets have another shape.
    """
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        raise ValueError(f"accuracy takes scores (batch, classes) of at least 2 classes, got {list(outputs.shape)}.")
    if targets.shape == outputs.shape and targets.is_floating_point():
        targets = targets.argmax(dim=1)
    if targets.shape not in ((batch := outputs.shape[:1]), (*batch, 1)):
        raise ValueError(
            f"accuracy takes class indices of shape (batch,) or (batch, 1) with scores of {list(outputs.shape)}, got "
            f"targets of {list(targets.shape)}. For one-hot targets, pass targets.argmax(dim=1)."
        )
    return (outputs.argmax(dim=1) == targets.reshape(-1)).double().mean()
