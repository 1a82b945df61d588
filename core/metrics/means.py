"""Metrics: means over samples, kept on the device until they are read, and objects that compute their own values."""

from __future__ import annotations

from array import array
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


FOLD = 64
EVALUATIONS = ("validation", "test")
PHASES = ("train", *EVALUATIONS, "predict")


class Sum:
    """A weighted sum of scalars on one device.

    A few terms at a time are added up in the precision of a loss, which costs two thirds of mixing in float64; then
    they are folded into float64, which sums of many samples need. On the CPU, where nothing has to be waited for,
    Python does that in a quarter of the time, for whole weights with the same bits: what it rounds to float64 and then
    to float32 is what float32 gives. float64 is left to torch, which rounds once for a product and a sum.
    """

    __slots__ = ("host", "part", "pending", "short", "start", "total", "weight")

    def __init__(self, host: float = 0.0, weight: float = 0.0, start: float = 0.0, pending: int = 0) -> None:
        self.host = host
        self.weight: Any = weight  # a tensor where counts are on a device
        self.start, self.pending = start, pending
        self.short: array[float] | None = None  # on the CPU, one number in the precision of a loss
        self.total: Tensor | None = None
        self.part: Tensor | None = None

    def add(self, name: str, value: Tensor, weight: float) -> None:
        """Add a scalar tensor with its weight, without waiting for its device."""
        short = self.short
        if short is None and self.part is None and value.is_cpu and value.dtype != torch.float64:
            check_scalar(name, value)
            short = self.short = array("f", [self.start])
        if short is not None and value.is_cpu:
            short[0] += value.item() * weight
        else:
            part = self._begin(name, value) if self.part is None else self.part
            if value.requires_grad:  # not in an evaluation, where a copy would cost a third of adding it
                value = value.detach()
            part.add_(value if value.ndim == 0 else value.reshape(()), alpha=weight)
        self.weight += weight
        self.pending += 1
        if self.pending == FOLD:
            self.pending = 0
            if self.short is not None:
                self.host += self.short[0]
                self.short[0] = 0.0
            elif self.total is not None and self.part is not None:
                self.total.add_(self.part)
                self.part.zero_()

    @property
    def on_host(self) -> float:
        """The sum of all terms that are not on a device."""
        return self.host + (self.start if self.short is None else self.short[0])

    def on_device(self) -> Tensor:
        """Return the sum of all terms on a device so far."""
        assert self.total is not None
        assert self.part is not None
        return self.total + self.part

    def state(self) -> list[float]:
        """Return what `Sum(*state)` continues from, to the last bit; waits for the device."""
        if self.total is None or self.part is None:
            start = self.start if self.short is None else self.short[0]
            return [self.host, float(self.weight), start, self.pending]
        return [self.host + self.total.item(), float(self.weight), self.part.item(), self.pending]

    def _begin(self, name: str, value: Tensor) -> Tensor:
        check_scalar(name, value)
        long = torch.float32 if value.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        short = long if value.dtype == torch.float64 else torch.float32
        start = self.start if self.short is None else self.short[0]
        self.total = torch.zeros((), dtype=long, device=value.device).add_(self.host)
        self.part = torch.zeros((), dtype=short, device=value.device).add_(start)
        self.host, self.start, self.short = 0.0, 0.0, None
        return self.part


class Means:
    """Weighted running means by name. Adding never waits for the device; `read` waits once.

    Metric objects are kept beside them: they compute their value when it is read.

    Args:
        note: is given a line about each value of a metric object that is not a number.

    Attributes:
        batch: the number of the batch in hand, where values of an evaluation are kept by batch.
        weights: what the means that were read last are of, by their names; metric objects have none.
        totals: the sum and its weight of all that was read so far, by name.
        others: what metric objects computed at the last reading that is not a number, by name.
    """

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        self.batch = 0
        self.others: dict[str, Any] = {}
        self.note = note
        self.weights: dict[str, float] = {}
        self.totals: dict[str, tuple[float, float]] = {}
        self._sums: dict[str, Sum] = {}
        self._objects: dict[str, Any] = {}
        self._idle: dict[str, Any] = {}  # objects that were read, and begin again
        self._saved: dict[str, Any] = {}  # states of objects that were not updated since

    def add(self, name: str, value: Tensor | float | Measured, weight: float = 1.0) -> None:
        """Add a value, a scalar tensor or a number, with its weight; or update a metric object.

        Raises:
            TypeError: neither a number nor a tensor.
            ValueError: a tensor of more than one element.
        """
        entry = self._sums.get(name)
        if entry is None:
            if isinstance(value, Measured):
                self._update(name, value)
                return
            entry = self._sums[name] = Sum()
        if isinstance(value, Tensor):
            entry.add(name, value, weight)
        else:
            check_scalar(name, value)
            entry.host += float(value) * weight  # type: ignore[arg-type]  # an object is never among the sums
            entry.weight += weight

    def add_sum(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add a sum with its count, which is kept where it is until it is read."""
        self.add(name, total)
        self._sums[name].weight += count - 1.0

    def settle(self, name: str, kept: list[tuple[Tensor, Any, bool]], stepped: bool) -> None:
        """Add the losses of a window that ends, unless it was not stepped with; drop them from those that are kept.

        Args:
            name: of their mean.
            kept: each with its weight, and whether it is the sum over that, not the mean.
            stepped: whether there was a step.
        """
        for loss, weight, is_sum in kept if stepped else ():
            if is_sum:
                self.add_sum(name, loss, weight)
            else:
                self.add(name, loss, weight)
        kept.clear()

    def for_evaluation(self) -> Means:
        """Return new means for one set of an evaluation."""
        return Means(self.note)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the states of the metric objects by name."""
        objects = {name: object_state(each) for name, each in self._objects.items()}
        return {**{name: entry.state() for name, entry in self._sums.items()}, **self._saved, **objects}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved sums; a metric object takes its state when it is next updated."""
        sums = {name: saved for name, saved in state.items() if isinstance(saved, list)}
        self._sums = {name: Sum(host, weight, start, int(rest)) for name, (host, weight, start, rest) in sums.items()}
        self._objects, self._saved = {}, {name: saved for name, saved in state.items() if name not in sums}

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return the sum and its weight by name; waits for the device once."""
        sums = {name: entry.on_host for name, entry in self._sums.items()}
        by_device: dict[torch.device, list[str]] = {}
        for name, entry in self._sums.items():
            if entry.total is not None:
                by_device.setdefault(entry.total.device, []).append(name)
        for names in by_device.values():
            values = torch.stack([self._sums[name].on_device() for name in names]).tolist()
            for name, value in zip(names, values, strict=True):
                sums[name] += value
        weights = {name: float(self._sums[name].weight) for name in sums}
        if wrong := [name for name, weight in weights.items() if weight != weight]:
            raise ValueError(
                f"{wrong[0]!r} was given with a count that is negative or not a number, or 0 where the sum is not."
            )
        return {name: (value, weights[name]) for name, value in sums.items()}

    def read(self, scope: str) -> dict[str, float]:
        """Return the means as `<scope>/<name>`, and start again."""
        sums = self.sums()
        self.totals = added(self.totals, sums)
        metrics = {f"{scope}/{name}": value / weight for name, (value, weight) in sums.items() if weight}
        self.weights = {f"{scope}/{name}": weight for name, (_, weight) in sums.items() if weight}
        values, self.others = self.computed()
        metrics |= {f"{scope}/{name}": value for name, value in values.items()}
        if self.note is not None:
            for name, value in self.others.items():
                self.note(describe_other(name, value))
        for each in self._objects.values():
            each.reset()
        self._idle |= self._objects
        self._sums, self._objects, self._saved = {}, {}, {}
        return metrics

    def computed(self) -> Computed:
        """Return what the metric objects have computed; of one that computes several values, `<name>/<key>` for each.

        The first dict has the numbers, the second all else, such as a confusion matrix.
        """
        return compute_values(self._objects)

    def _update(self, name: str, value: Measured) -> None:
        if (own := self._objects.get(name)) is None:
            own = self._objects[name] = self._idle.pop(name, None) or fresh_copy(value.metric, value.outputs)
            if name in self._saved:
                load_object(own, self._saved.pop(name))
        try:
            with torch.no_grad():
                own.update(value.outputs, value.targets)
        except Exception as error:
            error.add_note(describe_metric(name, value.outputs, value.targets))
            raise


Totals = dict[str, tuple[float, float]]


def added(one: Totals, other: Totals) -> Totals:
    """Return sums and their weights, added up by name."""
    totals = dict(one)
    for name, (value, weight) in other.items():
        value_before, weight_before = totals.get(name, (0.0, 0.0))
        totals[name] = value_before + value, weight_before + weight
    return totals


def own_name(name: object, phase: str) -> str:
    """Return the name of a value within its phase: `loss` for `train/loss`, as people write it.

    Raises:
        TypeError: it is not a string.
        ValueError: it is of another phase.
    """
    if not isinstance(name, str):
        raise TypeError(f"The name of a value that is measured is a string, such as 'loss'; got {name!r}.")
    split, _, rest = name.partition("/")
    if rest and (split == phase or {split, phase} == {*EVALUATIONS}):  # a test may be the validation's step
        return rest
    if split in PHASES:
        raise ValueError(
            f"{name!r} cannot be tracked in {phase}, where each value becomes {phase}/<name>: track {rest!r}."
        )
    return name


def reserved(name: str, phase: str) -> ValueError:
    """Return the error of a value that is tracked by the name of a returned one."""
    what = "the returned loss" if phase == "train" else f"a value that {phase}_step returns"
    return ValueError(
        f"The name {name!r} is reserved for {what}: run.track({name!r}, ...) would mix both in {phase}/{name}. "
        f"Remove the call, or track the value by another name."
    )


def check_scalar(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a number or a tensor, ValueError where that has not one element."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"Metric {name!r} must be a number or a scalar tensor, got {value!r}.")
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"Metric {name!r} must be a scalar to be averaged, got a tensor of shape {list(value.shape)}.")


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of samples whose largest output is the target class, a scalar tensor.

    Args:
        outputs: scores, (batch, classes).
        targets: class indices, (batch,) or (batch, 1); or probabilities, (batch, classes), as of `Mixup`: the likeliest
            class counts.

    Raises:
        ValueError: the outputs or the targets are not of such a shape.
    """
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        raise ValueError(
            f"accuracy takes scores of shape (batch, classes), two classes or more, got {list(outputs.shape)}."
        )
    if targets.shape == outputs.shape and targets.is_floating_point():
        targets = targets.argmax(dim=1)
    if targets.shape not in ((batch := outputs.shape[:1]), (*batch, 1)):
        raise ValueError(
            f"accuracy takes class indices of shape (batch,) or (batch, 1) with scores of {list(outputs.shape)}, got "
            f"targets of {list(targets.shape)}. Of one-hot targets, take the indices: targets.argmax(dim=1)."
        )
    return (outputs.argmax(dim=1) == targets.reshape(-1)).double().mean()
