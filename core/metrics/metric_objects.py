"""Check, measure, copy and save the metrics of a task: functions, and objects like the metrics of torchmetrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..system.extras import kind_of
from . import Computed, MetricUpdate, is_metric_object


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
