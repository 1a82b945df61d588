"""Step the optimizer once for several micro-batches."""

from __future__ import annotations

from collections.abc import Mapping

from ..events import BatchStart, GradientsReady, Lane, Run
from ..plugins import Plugin, on


class GradientAccumulation(Plugin):
    """Accumulate the gradients of n micro-batches, as one large batch would give them.

    The loss of each is divided by the size of its window, so the gradient is the mean. The last window of an epoch may
    be shorter: it is divided by its own size where the loader tells its length; otherwise, and where a batch is
    skipped, the gradients are rescaled before the step. Micro-batches count equally, whatever their sizes. Windows
    never cross an epoch. Toggled amid a window, that window keeps the weights that its batches were given.

    Args:
        n: micro-batches per optimizer step, or a schedule `{first epoch: n}` such as `{0: 1, 5: 4}`.

    Raises:
        ValueError: n is not positive, or the schedule does not begin at epoch 0.
    """

    exclusive = ("accumulation",)

    def __init__(self, n: int | Mapping[int, int]) -> None:
        schedule = dict(sorted(n.items())) if isinstance(n, Mapping) else {0: n}
        if 0 not in schedule:
            raise ValueError(f"A schedule of accumulation begins at epoch 0, as in {{0: 1, 5: 4}}; got {schedule}.")
        for epoch, number in schedule.items():
            if not all(isinstance(each, int) for each in (epoch, number)) or number < 1 or epoch < 0:
                raise ValueError(
                    f"Accumulation takes whole numbers of at least 1, got {number!r} from epoch {epoch!r}."
                )
        self.schedule = schedule
        self._size = 0  # of the window under way, 0 where there is none of ours

    def number(self, epoch: int) -> int:
        """Return the micro-batches per step in an epoch."""
        return next(number for first, number in reversed(self.schedule.items()) if first <= epoch)

    @on(BatchStart)
    def weigh(self, run: Run, event: BatchStart) -> None:
        """Scale the loss, and hold the step until the window is full."""
        number = self.number(run.progress.epoch)
        if number == 1:
            return
        place = run.progress.batch % number
        self._size = number
        if run.batches_per_epoch is not None:
            self._size = min(number, max(1, run.batches_per_epoch - run.progress.batch + place))
        run.control.scale_loss(1 / self._size, f"one of {self._size} micro-batches")
        if place + 1 < number:
            run.control.hold_step(f"windows of {number} micro-batches")

    @on(GradientsReady, lane=Lane.TRANSFORM)
    def rescale(self, run: Run, event: GradientsReady) -> None:
        """Give a window that came out smaller than foreseen its true weight."""
        size, self._size = self._size, 0
        if size and run.window != size:
            factor = size / run.window
            for group in run.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
