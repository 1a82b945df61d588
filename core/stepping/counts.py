"""Losses that are sums, each with its count, such as those over tokens: windows are divided by their counts."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, log2
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

Count = float | Tensor  # a tensor where its device would have to be waited for
Place = tuple[str, int, int]
PAIR = "(loss_sum, count), the sum over what is counted, a scalar tensor, and how many that are"
WIDE = (torch.float32, torch.float64)


@dataclass(slots=True)
class Weight:
    """What `run.stepping.weigh` was given.

    Attributes:
        place: the batch that it is for.
        count: what its losses are means over.
        is_used: whether a loss was weighed by it.
    """

    place: Place
    count: Count
    is_used: bool = False

    def sum_of(self, mean: Tensor) -> tuple[Tensor, Count]:
        """Return the sum that a mean is of, and its count."""
        self.is_used = True
        total = _wide(mean) * self.count
        return total, _known(total, self.count)


def weigh(run: Any, count: Any) -> None:
    """Note what the losses of the batch in hand are means over; see `heliograph.Run`."""
    if run.phase == "train" and not run.data.in_hand:
        raise RuntimeError(
            "run.stepping.weigh(count) is for the batch in hand: call it in training_step, before run.step(loss), or "
            "in a handler of BatchStart."
        )
    given = weight_of(run)
    if given is not None and not given.is_used:
        raise RuntimeError(
            "run.stepping.weigh(count) was called twice for one loss. GradientAccumulation(weight=...) calls it too: "
            "leave that out, or the call in the step."
        )
    run.work.weight = Weight(_place(run), check_count("What run.stepping.weigh is given", count))
    run.stepping.checked = None


def weight_of(run: Any) -> Weight | None:
    """Return what the batch in hand was weighed by, if it was."""
    given: Weight | None = run.work.weight
    return given if given is not None and given.place == _place(run) else None


def take_loss(run: Any, window: Any, loss: Any) -> Tensor:
    """Return a loss, or the mean that a sum with its count comes to; the window then takes the sum backward.

    Args:
        run: the run.
        window: the `OptimizerWindow` that it is for.
        loss: a scalar tensor, or a pair.

    Raises:
        RuntimeError: it came as a pair, and was weighed; or some losses of its window have a count and others not.
        TypeError: the pair is not one of a sum and its count.
        ValueError: the count is negative or not a number, or 0 with a sum that is not.
    """
    given, counts, mean = weight_of(run), window.counts, None
    is_pair = loss.__class__ is tuple
    if is_pair:
        check_unweighed(given)
        total, count = check_pair("training_step", loss)
    is_counted = is_pair or given is not None
    if window.size and is_counted != (counts is not None):
        raise RuntimeError(
            f"The loss of this micro-batch has {'a' if is_counted else 'no'} count, others of its window have "
            f"{'none' if is_counted else 'one'}: give it with every loss of a window, or with none."
        )
    if not is_counted:
        if counts is not None:
            counts.release()
        return loss  # type: ignore[no-any-return]  # a tensor
    if not is_pair:
        assert given is not None
        mean, (total, count) = loss, given.sum_of(loss)
    return (counts or WindowCounts(run, window)).add(total, count, mean)


def add_value(run: Any, name: str, value: Any, size: int) -> None:
    """Add a value of a validation or test to its mean: a pair of a sum and its count, or a weighed value."""
    if value.__class__ is tuple:
        total, count = check_pair(f"{run.phase}_step", value, name)
        run.means.add_sum(name, total, count)
    elif (given := weight_of(run)) is None or not isinstance(value, Tensor | Real):
        run.means.add(name, value, size)
    elif isinstance(value, Tensor):
        run.means.add_sum(name, *given.sum_of(value.detach()))
    else:
        given.is_used = True
        run.means.add_sum(name, float(value) * given.count, given.count)


class WindowCounts:
    """What the losses of a window are sums over.

    A loss is taken backward in units of a power of two near the training's first count times the micro-batches of a
    window, so no gradient becomes large; the rest of the division is made when all ranks' counts are known. No bit
    depends on the unit. Counts on a device are added up there, and read once, when the window ends.

    Args:
        run: the run.
        window: the window, whose backward passes are those of the sums from now on, until `release`.

    Attributes:
        count: of all ranks, of the window that ended last.

    Raises:
        ValueError: the engine steps within the backward pass.
    """

    def __init__(self, run: Any, window: Any) -> None:
        if getattr(run.engine, "steps_in_backward", False):
            raise ValueError(
                f"Gradients of losses with counts are divided before the step, and {type(run.engine).__name__} steps "
                f"within the backward pass, as DeepSpeed does: return means, without a count."
            )
        self._run, self._window = run, window
        self._former = window.backward, window.backward_scaled
        window.counts, window.backward, window.backward_scaled = self, self._backward, self._backward_scaled
        self.count = 0.0
        self._loss: Tensor | None = None  # to take backward
        self._unit: float | None = None  # None for a window of one micro-batch on one rank
        self._clear()

    def release(self) -> None:
        """Let the window take losses backward that are means."""
        self._window.counts, (self._window.backward, self._window.backward_scaled) = None, self._former

    def add(self, total: Tensor, count: Count, mean: Tensor | None) -> Tensor:
        """Add the sum of a micro-batch, with its count; return the mean, which is given where the loss was one."""
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
        self._keep(count)
        return mean.detach()

    def normalise(self) -> None:
        """Divide the gradients of a window that ends by the counts of all ranks. A collective.

        Raises:
            ValueError: a count that was on a device is not valid.
        """
        run, window = self._run, self._window
        if not window.size:  # its gradients were computed by the user's own loop
            return
        run.engine.unscale(window.optimizer)
        self.count, tokens = self._read()
        run.progress.tokens += round(tokens)
        if not self.count:
            run.control.drop_step("the counts of its micro-batches are all 0")
            run.warn("A window whose losses count nothing, as without a token, was not stepped with.")
        elif self._unit is not None and (factor := run.engine.world_size * self._unit / self.count) != 1.0:
            held = [each for group in window.optimizer.param_groups for each in group["params"]]
            if gradients := [each.grad for each in held if each.grad is not None]:
                torch._foreach_mul_(gradients, factor)
        self._clear()

    def _clear(self) -> None:
        self._sums = [0.0, 0.0]  # of the counts, and of those that are the first of their batch
        self._on_device: Tensor | None = None  # the same two

    def _unit_for(self, count: Count) -> float:
        """Return the unit of the window: near the first count, of which the ranks agree once in a training, times n."""
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

    def _keep(self, count: Count) -> None:
        stepping, place = self._run.stepping, _place(self._run)
        is_first, stepping.counted = stepping.counted != place, place
        if isinstance(count, Tensor):
            both = torch.stack([count, count * is_first])
            self._on_device = both if self._on_device is None else self._on_device + both
        else:
            self._sums[0] += count
            self._sums[1] += count * is_first

    def _read(self) -> list[float]:
        """Return both sums, of all ranks."""
        sums = self._sums
        if self._on_device is not None:
            sums = [_valid(own + other) for own, other in zip(sums, self._on_device.tolist(), strict=True)]
        if self._run.engine.world_size > 1:
            sums = self._run.engine.reduce(torch.tensor(sums, dtype=torch.float64), "sum").tolist()
        return sums

    def _backward(self, loss: Tensor) -> None:
        self._backward_scaled(loss, 1.0)

    def _backward_scaled(self, mean: Tensor, scale: float) -> None:
        """Take the sum backward whose mean is given, without what only makes the mean of a window."""
        loss, self._loss = self._loss, None
        assert loss is not None
        scale /= self._run.control.mean_scale
        self._former[1](loss, scale if self._unit is None else scale / self._unit)


def check_unweighed(given: Weight | None) -> None:
    """Raise RuntimeError where a loss that came as a pair was weighed, too."""
    if given is not None and not given.is_used:
        raise RuntimeError(
            "A loss came as a pair of its sum and count, and run.stepping.weigh(count) was called for it: do one of "
            "the two. GradientAccumulation(weight=...) calls it: leave weight= out."
        )


def check_pair(step: str, pair: tuple[Any, ...], name: str = "loss") -> tuple[Any, Count]:
    """Return a sum, a scalar tensor or outside of the training a number, and its count.

    Raises:
        TypeError: they are something else, or the count is not an integer.
        ValueError: the sum is not a scalar; the count is negative, or 0 with a sum that is not.
    """
    if len(pair) != 2:
        raise TypeError(f"{step} returns a loss or {PAIR}; got a tuple of {len(pair)}.")
    total, given = pair
    if isinstance(given, Tensor):
        is_integer = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
    else:
        is_integer = isinstance(given, Integral) and not isinstance(given, bool)
    if not is_integer:
        raise TypeError(
            f"{step} returned a pair as {name!r} whose second value, {given!r:.100}, is not an integer, so no count. "
            f'To log a metric with the loss, call run.track("accuracy", accuracy) and `return loss`. To average over '
            f"tokens, `return loss_sum, count` with an integer count, such as mask.sum() of a boolean mask."
        )
    if not isinstance(total, Tensor) and (step == "training_step" or not isinstance(total, Real)):
        raise TypeError(f"{step} returns {PAIR}: the sum must be a tensor, got {type(total).__name__}.")
    if isinstance(total, Tensor) and total.ndim:
        raise ValueError(f"{step} returns {PAIR}: the sum has the shape {list(total.shape)}, take loss.sum().")
    return total, _known(total, check_count(f"The count that {step} returns", given), name)


def check_count(what: str, count: Any) -> Count:
    """Return a count as a number, or as it is on a device that would have to be waited for.

    Raises:
        TypeError: it is neither a number nor a tensor of one.
        ValueError: it is negative or not finite.
    """
    is_number = isinstance(count, Real) and not isinstance(count, bool)
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex() and count.dtype != torch.bool:
        if not _is_at_hand(count):
            long = torch.float32 if count.device.type == "mps" else torch.float64
            return count.detach().reshape(()).to(long)
        count, is_number = count.item(), True
    if not is_number:
        given = f"{count.dtype} of shape {list(count.shape)}" if isinstance(count, Tensor) else repr(count)
        raise TypeError(f"{what} is a number or a tensor of one, such as mask.sum(); got {given:.100}.")
    if not 0 <= count < inf:
        raise ValueError(f"{what} is a finite number, at least 0; got {count}.")
    return float(count)


def _known(total: Any, count: Count, name: str = "loss") -> Count:
    """Return a count that its sum allows; where a device would have to be waited for, NaN there if it does not.

    Raises:
        ValueError: it is 0, and its sum is not.
    """
    if isinstance(count, Tensor):
        return torch.where((count > 0) | ((count == 0) & (total == 0)), count, torch.nan)
    if count:
        return count
    if isinstance(total, Tensor) and not _is_at_hand(total):
        return torch.where(total == 0, 0.0, torch.nan)
    value = total.item() if isinstance(total, Tensor) else float(total)
    if value != 0:
        raise ValueError(
            f"{name!r} has the count 0, but its sum is {value}: of nothing the sum is 0, as with "
            f"reduction='sum'; the mean of nothing is not a number."
        )
    return count


def _valid(count: float) -> float:
    if not isfinite(count):
        raise ValueError(
            "A count of the micro-batches since the last step is negative or not finite, or it is 0 and its sum is not."
        )
    return count


def _divided(total: Tensor, count: Count) -> Tensor:
    """Return the mean; of nothing, 0."""
    total = _wide(total)
    if isinstance(count, Tensor):
        return total / torch.where(count > 0, count, 1.0).to(total.device, total.dtype)
    return total / (count or 1.0)


def _is_at_hand(tensor: Tensor) -> bool:
    """Return whether a value can be read without a wait for its device."""
    return tensor.device.type == "cpu"


def _wide(loss: Tensor) -> Tensor:
    return loss if loss.dtype in WIDE else loss.float()


def _place(run: Any) -> Place:
    return run.phase, run.progress.batches, run.progress.evaluated
