"""Step the optimizer once for several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..events import BatchStart, GradientsReady, Lane, Run
from ..events.checks import check_whole_number
from ..plugins import Plugin, on


class GradientAccumulation(Plugin):
    """Accumulate the gradients of several micro-batches.

    They are those that one large batch would give.

    The loss of each is divided by the size of its window, so the gradient is the mean. The last window of an epoch may
    be shorter: it is divided by its own size where the loader has a length; otherwise, and where a batch is
    skipped, the gradients are rescaled before the step. Micro-batches count equally, whatever their sizes. Windows
    never cross an epoch. Toggled within a window, that window keeps the weights that its batches were given.

    Where a loss is not a mean over all samples of its batch (tokens that are left out, samples of unequal length), a
    task returns the sum and its count; see `Task.training_step`. For one that returns means, such as `Supervised`, give
    the `weight` of each batch, which is then given to `run.stepping.weigh`: the gradient is the weighted mean over the
    window, of all ranks, as if it had been one batch. A window whose weights are all zero is not stepped.

    Of several optimizers each has a window of its own. In the last micro-batch of a window a loss sees the step of the
    optimizer before it, in the others none: with n micro-batches adversarial training is not what it is with one large
    batch.

    Args:
        n: micro-batches per optimizer step, or a schedule `{first epoch: n}` such as `{0: 1, 5: 4}`.
        weight: returns what the loss of a batch is a mean over, such as `lambda batch: (batch[1] != -100).sum()`; a
            number or a tensor of one, at least 0. None weighs all batches alike, unless the task counts.

    Raises:
        TypeError: `weight` cannot be called.
        ValueError: n is not positive, or the schedule does not begin at epoch 0; in a run, a weight is negative or not
            finite.
        RuntimeError: in a run, there are weights, and the task counts by itself.
    """

    exclusive = ("accumulation",)
    asks = ("hold_step", "scale_loss")

    def __init__(self, n: int | Mapping[int, int], *, weight: Callable[[Any], Any] | None = None) -> None:
        if weight is not None and not callable(weight):
            raise TypeError(f"weight= is a function of a batch, such as lambda batch: len(batch[1]); got {weight!r}.")
        schedule = {
            check_whole_number("The epoch of a schedule of accumulation", epoch, at_least=0): check_whole_number(
                f"n from epoch {epoch!r}", number, of="micro-batches", at_least=1
            )
            for epoch, number in (n if isinstance(n, Mapping) else {0: n}).items()
        }
        if 0 not in schedule:
            raise ValueError(f"A schedule of accumulation begins at epoch 0, as in {{0: 1, 5: 4}}; got {schedule}.")
        self.schedule = dict(sorted(schedule.items()))
        self._size = 0  # of the window under way, 0 where there is none of ours
        self.weight = weight

    def number(self, epoch: int) -> int:
        """Return the micro-batches of this process per step in an epoch."""
        return next(number for first, number in reversed(self.schedule.items()) if first <= epoch)

    def describe(self, run: Run) -> str:
        """Say how many micro-batches make a step."""
        rest = "".join(f", {number} from epoch {epoch} on" for epoch, number in self.schedule.items() if epoch)
        return f"steps after {self.schedule[0]} micro-batches{rest}"

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
        """Give a window that came out smaller than foreseen its true weight; each optimizer has its own."""
        if run.report.is_replay or run.stepping.window_count is not None:
            return
        factor = self._size / run.stepping.window if self._size else 1.0
        if factor != 1.0:
            for group in run.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
