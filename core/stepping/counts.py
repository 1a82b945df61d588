"""Losses given as a sum and a count, such as over tokens: each window is divided by its total count."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, log2
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

Count = float | Tensor  # a tensor if reading it would wait for its device
Place = tuple[str, int, int]
PAIR = "(loss_sum, count): a scalar tensor, the sum over all items, and the number of items"
WIDE = (torch.float32, torch.float64)


@dataclass(slots=True)
class Weight:
    """The count given to `run.stepping.weigh`.

    Attributes:
        place: the batch that it applies to.
        count: the number of items that the loss of the batch is a mean over.
        is_used: whether a loss was weighted by it.
    """

    place: Place
    count: Count
    is_used: bool = False

    def sum_of(self, mean: Tensor) -> tuple[Tensor, Count]:
        self.is_used = True
        total = _wide(mean) * self.count
        return total, _checked_against(total, self.count)


def weigh(run: Any, count: Any) -> None:
    if run.phase == "train" and not run.data.in_hand:
        remedy = "call it in training_step, before run.step(loss), or in a handler of BatchStart"
        raise RuntimeError(f"run.stepping.weigh(count) needs a current batch: {remedy}.")
    weight = weight_of(run)
    if weight is not None and not weight.is_used:
        raise RuntimeError("run.stepping.weigh(count) was called twice for one loss; GradientAccumulation may do so.")
    run.work.weight = Weight(_place(run), check_count("The count for run.stepping.weigh", count))
    run.stepping.checked = None


def weight_of(run: Any) -> Weight | None:
    weight: Weight | None = run.work.weight
    return weight if weight is not None and weight.place == _place(run) else None


def take_loss(run: Any, window: Any, loss: Any) -> Tensor:
    """Return the mean of a loss; the window backpropagates the sum.

    Args:
        run: the run.
        window: the `OptimizerWindow` of the loss.
        loss: a scalar tensor, or a pair (sum, count).

    Raises:
        RuntimeError: the loss is a pair and was weighted too, or only some losses of the window have a count.
        TypeError: the pair is not a sum and a count.
        ValueError: the count is negative or not a number, or it is 0 and the sum is not.
    """
    weight, counts, mean = weight_of(run), window.counts, None
    is_pair = loss.__class__ is tuple
    if is_pair:
        check_unweighed(weight)
        total, count = check_pair("training_step", loss)
    is_counted = is_pair or weight is not None
    if window.size and is_counted != (counts is not None):
        raise RuntimeError("Some losses of this window have a count, others have none: give a count with all or none.")
    if not is_counted:
        if counts is not None:
            counts.release()
        return loss  # type: ignore[no-any-return]  # a tensor
    if not is_pair:
        assert weight is not None
        mean, (total, count) = loss, weight.sum_of(loss)
    return (counts or WindowCounts(run, window)).add(total, count, mean)


def add_value(run: Any, name: str, value: Any, size: int) -> None:
    if value.__class__ is tuple:
        total, count = check_pair(f"{run.phase}_step", value, name)
        run.means.add_sum(name, total, count)
    elif (weight := weight_of(run)) is None or not isinstance(value, Tensor | Real):
        run.means.add(name, value, size)
    elif isinstance(value, Tensor):
        run.means.add_sum(name, *weight.sum_of(value.detach()))
    else:
        weight.is_used = True
        run.means.add_sum(name, float(value) * weight.count, weight.count)


class WindowCounts:
    """The sums and counts of the losses of a window.

    The backward pass runs on loss / unit, so no gradient becomes large. The unit is a power of two near the first count
    of the training times the micro-batches of a window, so it changes no bit of the result. The rest of the division
    follows when the counts of all ranks are known. Counts on a device are added up there and read once, when the window
    ends.

    Args:
        run: the run.
        window: the window, whose backward functions are replaced until `release`.

    Attributes:
        count: the count of all ranks in the last complete window.

    Raises:
        ValueError: the engine steps during the backward pass.
    """

    def __init__(self, run: Any, window: Any) -> None:
        if getattr(run.engine, "steps_in_backward", False):
            raise ValueError(f"{type(run.engine).__name__} steps during the backward pass: return mean losses.")
        self._run, self._window = run, window
        self._replaced = window.backward, window.backward_scaled
        window.counts, window.backward, window.backward_scaled = self, self._backward, self._backward_scaled
        self.count = 0.0
        self._loss: Tensor | None = None  # for the next backward pass
        self._unit: float | None = None  # None for a window of one micro-batch on one rank
        self._clear()

    def release(self) -> None:
        self._window.counts, (self._window.backward, self._window.backward_scaled) = None, self._replaced

    def add(self, total: Tensor, count: Count, mean: Tensor | None) -> Tensor:
        run, window = self._run, self._window
        if mean is None:
            mean = _divided(total, count)
        is_whole = not window.size and (not run.control.holds_step or run.data.is_last_batch)
        if is_whole and run.engine.world_size == 1:
            self._loss, self._unit = mean, None
        else:
            self._loss, self._unit = total, self._unit_for(count)
        if run.report.tracks:
            window.kept.append((total.detach().clone(), count, True))
        self._add_count(count)
        return mean.detach()

    def normalise(self) -> None:
        # A collective.
        run, window = self._run, self._window
        if not window.size:  # its gradients were computed by the user's own loop
            return
        run.engine.unscale(window.optimizer)
        self.count, tokens = self._read()
        run.progress.tokens += round(tokens)
        if not self.count:
            run.control.drop_step("the counts of its micro-batches are all 0")
            run.warn("A step was skipped: the counts of all losses of its window are 0.")
        elif self._unit is not None and (factor := run.engine.world_size * self._unit / self.count) != 1.0:
            parameters = [parameter for group in window.optimizer.param_groups for parameter in group["params"]]
            if gradients := [parameter.grad for parameter in parameters if parameter.grad is not None]:
                torch._foreach_mul_(gradients, factor)
        self._clear()

    def _clear(self) -> None:
        self._sums = [0.0, 0.0]  # of all counts, and of the first count of each batch
        self._on_device: Tensor | None = None  # the same two

    def _unit_for(self, count: Count) -> float:
        # Near the first count, which the ranks agree on once in a training, times the micro-batches of a window.
        units, name = self._run.stepping.units, self._window.name
        if self._window.size:
            assert self._unit is not None
            return self._unit
        if name not in units:
            first = float(self._run.engine.reduce(_valid(float(count)), "max"))
            if not first:
                return 1.0
            units[name] = 2.0 ** round(log2(first))
        return float(units[name] / 2.0 ** round(log2(self._run.control.mean_scale)))

    def _add_count(self, count: Count) -> None:
        stepping, place = self._run.stepping, _place(self._run)
        is_first, stepping.counted = stepping.counted != place, place
        if isinstance(count, Tensor):
            both = torch.stack([count, count * is_first])
            self._on_device = both if self._on_device is None else self._on_device + both
        else:
            self._sums[0] += count
            self._sums[1] += count * is_first

    def _read(self) -> list[float]:
        sums = self._sums
        if self._on_device is not None:
            sums = [_valid(host + device) for host, device in zip(sums, self._on_device.tolist(), strict=True)]
        if self._run.engine.world_size > 1:
            sums = self._run.engine.reduce(torch.tensor(sums, dtype=torch.float64), "sum").tolist()
        return sums

    def _backward(self, loss: Tensor) -> None:
        self._backward_scaled(loss, 1.0)

    def _backward_scaled(self, mean: Tensor, scale: float) -> None:
        loss, self._loss = self._loss, None
        assert loss is not None
        scale /= self._run.control.mean_scale
        self._replaced[1](loss, scale if self._unit is None else scale / self._unit)


def check_unweighed(weight: Weight | None) -> None:
    if weight is not None and not weight.is_used:
        raise RuntimeError(
            "A loss was returned as (sum, count), and run.stepping.weigh(count) was called for it: use one of the two. "
            "GradientAccumulation(weight=...) calls it: remove weight=."
        )


def check_pair(step: str, pair: tuple[Any, ...], name: str = "loss") -> tuple[Any, Count]:
    """Return the sum and the count of a pair. The sum is a scalar tensor; outside of training, a number is allowed.

    Raises:
        TypeError: the sum is not a scalar, or the count is not an integer.
        ValueError: the count is negative.
    """
    if len(pair) != 2:
        raise TypeError(f"{step} returns a loss or {PAIR}; got a tuple of {len(pair)}.")
    total, count = pair
    if isinstance(count, Tensor):
        is_integer = not (count.is_floating_point() or count.is_complex() or count.dtype == torch.bool)
    else:
        is_integer = isinstance(count, Integral) and not isinstance(count, bool)
    if not is_integer:
        raise TypeError(
            f"{step} returned a pair as {name!r} whose second value, {count!r:.100}, is not an integer count. To log a "
            f"metric, call run.track(name, value); to average over tokens, return loss_sum, mask.sum()."
        )
    if not (isinstance(total, Tensor) and total.ndim == 0) and (step == "training_step" or not isinstance(total, Real)):
        got = f"shape {list(total.shape)}" if isinstance(total, Tensor) else f"type {type(total).__name__}"
        raise TypeError(f"{step} returns {PAIR}; the sum has {got}. For the sum of a tensor, use loss.sum().")
    return total, _checked_against(total, check_count(f"The count that {step} returns", count))


def check_count(role: str, count: Any) -> Count:
    # A tensor on a device stays there, so that nothing waits for it.
    is_number = isinstance(count, Real) and not isinstance(count, bool)
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex() and count.dtype != torch.bool:
        if not _is_at_hand(count):
            long = torch.float32 if count.device.type == "mps" else torch.float64
            return count.detach().reshape(()).to(long)
        count, is_number = count.item(), True
    if not is_number:
        got = f"{count.dtype} of shape {list(count.shape)}" if isinstance(count, Tensor) else repr(count)
        raise TypeError(f"{role} is a number or a tensor of one element, such as mask.sum(); got {got:.100}.")
    if not 0 <= count < inf:
        raise ValueError(f"{role} is a finite number, at least 0; got {count}.")
    return float(count)


def _checked_against(total: Any, count: Count) -> Count:
    # An impossible count becomes NaN and is reported when it is read, so that nothing waits for a device.
    if isinstance(count, float) and count:
        return count
    total, count = torch.as_tensor(total), torch.as_tensor(count)
    return torch.where((count > 0) | ((count == 0) & (total == 0)), count, torch.nan)


def _valid(count: float) -> float:
    if not isfinite(count):
        raise ValueError("The count of a micro-batch is negative or not finite, or it is 0 and its sum is not.")
    return count


def _divided(total: Tensor, count: Count) -> Tensor:
    total = _wide(total)
    if isinstance(count, Tensor):
        return total / torch.where(count > 0, count, 1.0).to(total.device, total.dtype)
    return total / (count or 1.0)


def _is_at_hand(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _wide(loss: Tensor) -> Tensor:
    return loss if loss.dtype in WIDE else loss.float()


def _place(run: Any) -> Place:
    return run.phase, run.progress.batches, run.progress.evaluated
