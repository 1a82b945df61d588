"""Metrics as users give them: functions of a batch, and objects that add up, such as those of torchmetrics."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..system.extras import kind_of
from .values import is_metric_object

Computed = tuple[dict[str, float], dict[str, Any]]  # the numbers by name, and what is not a number


def named_metrics(given: Any) -> dict[str, Any]:
    """Return metrics by name; a collection of several, which names them itself, has the empty name.

    Raises:
        TypeError: they are not metrics.
        ValueError: one is called `loss`.
    """
    if not isinstance(given, Mapping) and not (is_metric_object(given) and hasattr(given, "keys")):
        raise TypeError(
            f"metrics= takes a dict of metrics by name, as in {{'accuracy': accuracy}}, or a MetricCollection; got "
            f"{given!r}."
        )
    if "loss" in [*given.keys()]:
        raise ValueError("A metric cannot be called 'loss': that is the loss itself.")
    metrics = dict(given) if isinstance(given, Mapping) else {"": given}
    for name, metric in metrics.items():
        if isinstance(metric, type) or not (callable(metric) or is_metric_object(metric)):
            raise TypeError(
                f"The metric {name!r} is a function of (outputs, targets), or an object with update(outputs, "
                f"targets), compute() and reset(); got {metric!r}."
            )
    return metrics


def measure(metrics: Mapping[str, Any], outputs: Any, targets: Any) -> Iterator[tuple[str, Any]]:
    """Yield the value of each metric for a batch by its name; of an object, what to update it with."""
    outputs = detached(outputs)
    for name, metric in metrics.items():
        try:
            is_object = hasattr(metric, "compute") and is_metric_object(metric)
            value = Measured(metric, outputs, targets) if is_object else metric(outputs, targets)
        except Exception as error:
            error.add_note(describe_metric(name, outputs, targets))
            raise
        yield name, value


class Measured:
    """What a metric object is updated with: an object with `update`, `compute` and `reset`, as of torchmetrics.

    Args:
        metric: the user's object. It is only copied: the copy in use begins with each log, and with each set.
        outputs: of the model.
        targets: of the batch.
    """

    __slots__ = ("metric", "outputs", "targets")

    def __init__(self, metric: Any, outputs: Any, targets: Any) -> None:
        self.metric, self.outputs, self.targets = metric, outputs, targets


def fresh_copy(metric: Any, outputs: Any = None) -> Any:
    """Return a copy of a metric object as it is before its first update, on the device of the outputs."""
    own = deepcopy(metric)
    if isinstance(own, nn.Module) and (device := _device_of(outputs)) is not None:
        own.to(device)
    own.reset()
    return own


def _device_of(outputs: Any) -> torch.device | None:
    """Return the device of the first tensor in a model's outputs, None where there is none."""
    if isinstance(outputs, Tensor):
        return outputs.device
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, list | tuple) else ()
    return next((device for each in parts if (device := _device_of(each)) is not None), None)


def detached(outputs: Any) -> Any:
    """Return a model's outputs without their graphs: tensors, and lists, tuples and dicts of these."""
    return _for_tensors(Tensor.detach, outputs)


def _for_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict | UserDict):
        made = copy(value)
        for name, each in value.items():
            made[name] = _for_tensors(function, each)
        return made
    return type(value)(_for_tensors(function, each) for each in value) if type(value) in (list, tuple) else value


def compute_values(objects: Mapping[str, Any]) -> Computed:
    """Return the value of each metric object, or its values by name: the numbers, then all else."""
    computed: dict[str, Any] = {}
    for name, metric in objects.items():
        value = metric.compute()
        if isinstance(value, Mapping):
            computed |= {f"{name}/{key}" if name else str(key): each for key, each in value.items()}
        else:
            computed[name] = value
    others = {name: _for_tensors(Tensor.cpu, value) for name, value in computed.items() if not _is_number(value)}
    return {name: float(value) for name, value in computed.items() if name not in others}, others


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else hasattr(value, "__float__")


def describe_other(name: str, value: Any) -> str:
    """Return where to find what a metric computed, as it is not a number."""
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
    return (
        f"the metric {name!r} is {what}, not a number: no log has it; run.collected[{name!r}] has it when a validation "
        f"or test ends. For a number of each class, wrap it, as in torchmetrics' ClasswiseWrapper"
    )


def describe_metric(name: str, outputs: Any, targets: Any) -> str:
    """Return which metric failed, and what it was given, as a note for its error."""
    given = (str(list(each.shape)) if isinstance(each, Tensor) else type(each).__name__ for each in (outputs, targets))
    return f"heliograph: in the metric {name!r}, given outputs and targets of {' and '.join(given)}"


def object_state(metric: Any) -> dict[str, Any]:
    """Return the state of a metric object, which a resume continues from.

    That is the one of its own `state_dict`; of torchmetrics, whose is empty, what it adds up; of others the attributes,
    if all of them are plain types and tensors. Else it is empty, and the next log covers what comes after the resume.
    """
    if isinstance(metric, nn.Module):
        parts = {path: part for path, part in metric.named_modules() if hasattr(part, "_defaults")}
        names = {path: (*part._defaults, "_update_count") for path, part in parts.items()}
        return {f"{path}.{name}": getattr(parts[path], name, 0) for path, own in names.items() for name in own}
    if callable(getattr(metric, "load_state_dict", None)):
        return dict(metric.state_dict())
    state = dict(vars(metric))
    return state if is_plain(state) else {}


def load_object(metric: Any, state: Mapping[str, Any]) -> None:
    """Continue from a saved state."""
    own = deepcopy(dict(state))
    if callable(getattr(metric, "load_state_dict", None)) and not isinstance(metric, nn.Module):
        metric.load_state_dict(own)
        return
    for name, value in own.items():
        path, _, attribute = name.rpartition(".")
        setattr(metric.get_submodule(path) if isinstance(metric, nn.Module) else metric, attribute, value)


def is_plain(value: Any) -> bool:
    """Return whether a value is of plain types and tensors, as checkpoints hold them."""
    if type(value) in (list, tuple):
        return all(is_plain(each) for each in value)
    if type(value) is dict:
        return all(is_plain(each) for pair in value.items() for each in pair)
    return type(value) in (bool, int, float, str, bytes, type(None), Tensor)
