"""Several micro-batches for one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..events import BatchStart, GradientsReady, Lane, Run
from ..events.checks import check_whole_number
from ..plugins import Plugin, on


class GradientAccumulation(Plugin):
    """Accumulate the gradients of several micro-batches for one optimizer step.

    The result equals the gradient of one large batch: each loss is divided by the number of micro-batches in its
    window. The last window of an epoch may be shorter. It is divided by its own size if the loader has a length;
    otherwise, or if a batch was skipped, the gradients are rescaled before the step. Micro-batches have equal weights,
    whatever their size. Windows never cross an epoch. If you toggle the plugin within a window, its batches keep their
    weights.

    If a loss is not a mean over all samples of its batch (ignored tokens, sequences of unequal length), return the sum
    and its count from the task; see `Task.training_step`. For a task that returns means, such as `Supervised`, pass
    `weight`; its value is passed to `run.stepping.weigh`. The gradient is then the weighted mean over the window and
    all ranks, as if it were one batch. A window whose weights are all zero is not stepped.

    With several optimizers, each has its own window. In the last micro-batch of a window, a loss sees the step of the
    previous optimizer, in the others it does not. Adversarial training with n micro-batches therefore differs from
    training with one large batch.

    Args:
        n: micro-batches per optimizer step, or a schedule `{first epoch: n}` such as `{0: 1, 5: 4}`.
        weight: returns what the loss of a batch is a mean over, such as `lambda batch: (batch[1] != -100).sum()`: a
            number or a tensor with one element, at least 0. None gives all batches equal weights, unless the task
            returns counts.

    Raises:
        TypeError: `weight` is not callable.
        ValueError: n is not positive, or the schedule does not begin at epoch 0; in a run, a weight is negative or not
            finite.
        RuntimeError: in a run, `weight` is passed and the task returns counts.
    """

    exclusive = ("accumulation",)
    asks = ("hold_step", "scale_loss")

    def __init__(self, n: int | Mapping[int, int], *, weight: Callable[[Any], Any] | None = None) -> None:
        if weight is not None and not callable(weight):
            raise TypeError(f"weight= takes a function, such as lambda batch: len(batch[1]); got {weight!r}.")
        schedule = {
            check_whole_number("The epoch of a schedule of accumulation", epoch, at_least=0): check_whole_number(
                f"n from epoch {epoch!r}", number, of="micro-batches", at_least=1
            )
            for epoch, number in (n if isinstance(n, Mapping) else {0: n}).items()
        }
        if 0 not in schedule:
            raise ValueError(f"A schedule of accumulation begins at epoch 0, as in {{0: 1, 5: 4}}; got {schedule}.")
        self.schedule = dict(sorted(schedule.items()))
        self._size = 0  # of the current window; 0 if its losses were not scaled
        self.weight = weight

    def number(self, epoch: int) -> int:
        """Return the micro-batches of this process per step in an epoch."""
        return next(number for first, number in reversed(self.schedule.items()) if first <= epoch)

    def describe(self, run: Run) -> str:
        later = "".join(f", {number} from epoch {epoch} on" for epoch, number in self.schedule.items() if epoch)
        return f"steps after {self.schedule[0]} micro-batches{later}"

    @on(BatchStart)
    def weigh(self, run: Run, event: BatchStart) -> None:
        """Scale the loss, and hold the step until the window is full."""
        number = self.number(run.progress.epoch)
        if self.weight is not None and not run.report.is_replay:
            run.stepping.weigh(self.weight(run.batch))
        place, self._size = run.progress.batch % number, 0
        if place + 1 < number:
            run.control.hold_step(f"windows of {number} micro-batches")
        if number == 1:
            return
        self._size = number
        if run.length.batches_per_epoch is not None:
            self._size = min(number, max(1, run.length.batches_per_epoch - run.progress.batch + place))
        run.control.scale_loss(1 / self._size, f"one of {self._size} micro-batches", averages=True)

    @on(GradientsReady, lane=Lane.TRANSFORM)
    def rescale(self, run: Run, event: GradientsReady) -> None:
        """Correct the weight of a window that is smaller than planned."""
        if run.report.is_replay or run.stepping.window_count is not None:
            return
        factor = self._size / run.stepping.window if self._size else 1.0
        if factor != 1.0:
            for group in run.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
