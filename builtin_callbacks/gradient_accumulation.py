"""Step the optimizer once for several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ..events import BatchStart, GradientsReady, Lane, Run, TrainStart
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
    the `weight` of each batch, which is then given to `run.weigh`: the gradient is the weighted mean over the window,
    of all ranks, as if it had been one batch. A window whose weights are all zero is not stepped.

    Of several optimizers each has a window of its own. In the last micro-batch of a window a loss sees the step of the
    optimizer before it, in the others none: with n micro-batches adversarial training is not what it is with one large
    batch.

    With `as_ranks`, and the same among `loader_params`, n counts the micro-batches of all processes together. A single
    process then continues what several began: it adds up the gradients of each rank separately, divides each sum by the
    number of ranks and adds these in the order of the ranks, as they would have: of two ranks, equal to the last bit.
    Any number of processes in between accumulates as usual, equal but for rounding. Then do not toggle it in a window.

    Args:
        n: micro-batches per optimizer step, or a schedule `{first epoch: n}` such as `{0: 1, 5: 4}`.
        as_ranks: how many ranks to add up as; each n is a multiple of it.
        weight: returns what the loss of a batch is a mean over, such as `lambda batch: (batch[1] != -100).sum()`; a
            number or a tensor of one, at least 0. None weighs all batches alike, unless the task counts.

    Raises:
        TypeError: `weight` cannot be called.
        ValueError: n is not positive, no multiple of `as_ranks`, or the schedule does not begin at epoch 0; in a run, a
            weight is negative or not finite.
        RuntimeError: in a run, there are weights, and the task counts by itself.
    """

    exclusive = ("accumulation",)
    asks = ("hold_step", "scale_loss")

    def __init__(
        self,
        n: int | Mapping[int, int],
        *,
        as_ranks: int | None = None,
        weight: Callable[[Any], Any] | None = None,
    ) -> None:
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
        if as_ranks is not None:
            as_ranks = check_whole_number("as_ranks=", as_ranks, of="ranks", at_least=1)
        for number in schedule.values():
            if number % (as_ranks or 1):
                raise ValueError(
                    f"With as_ranks={as_ranks}, n counts the micro-batches of all ranks: a multiple, got {number}."
                )
        self.schedule = dict(sorted(schedule.items()))
        self.as_ranks = as_ranks
        self._size = 0  # of the window under way, 0 where there is none of ours
        self._processes = 1  # that share the micro-batches of a step
        self._sums: RankSums | None = None
        self.weight = weight

    def number(self, epoch: int, world_size: int | None = None) -> int:
        """Return the micro-batches of this process per step in an epoch.

        Args:
            epoch: its index.
            world_size: the number of processes of a run that is yet to begin; by default that of the run.
        """
        whole = next(number for first, number in reversed(self.schedule.items()) if first <= epoch)
        if self.as_ranks is None:
            return whole
        return whole // (world_size or self._processes)

    def describe(self, run: Run) -> str:
        """Say how many micro-batches make a step."""
        rest = "".join(f", {number} from epoch {epoch} on" for epoch, number in self.schedule.items() if epoch)
        return f"steps after {self.schedule[0]} micro-batches{rest}"

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """See how many processes there are.

        Raises:
            ValueError: they cannot share the ranks, the data are not read as these would, or what is to be added up
                apart is not of one optimizer, or scaled.
        """
        self._sums, world_size = None, run.engine.world_size
        if self.as_ranks is None:
            return
        if self.as_ranks % world_size:
            raise ValueError(f"as_ranks={self.as_ranks} is not a multiple of the {world_size} processes.")
        if not run.data.reads_as(self.as_ranks):
            raise ValueError(
                f"GradientAccumulation(as_ranks={self.as_ranks}) is for data that are read as by so many ranks: give "
                f"fit a dataset, and the same in loader_params={{'batch_size': ..., 'as_ranks': {self.as_ranks}}}."
            )
        self._processes = world_size
        if world_size == 1 and self.as_ranks > 1:
            if len(run.optimizers) > 1:
                raise ValueError("as_ranks= is for one optimizer: several step one after the other on each rank.")
            if getattr(getattr(run.engine, "precision", None), "scaling", None) is not None:
                raise ValueError("as_ranks= is not for precision='fp16', whose gradients are unscaled all at once.")
            self._sums = RankSums(self.as_ranks)
            run.when_exchanging(partial(self._sums.add_up, run))

    @on(BatchStart)
    def weigh(self, run: Run, event: BatchStart) -> None:
        """Scale the loss, and hold the step until the window is full."""
        number = self.number(run.progress.epoch)
        if self.weight is not None and not run.is_replay:
            run.weigh(self.weight(run.batch))
        place, self._size = run.progress.batch % number, 0
        if self._sums is not None and number > 1:
            self._sums.turn(run, place)
        if place + 1 < number:
            run.control.hold_step(f"windows of {number} micro-batches")
        if number == 1:
            return
        self._size = number
        if run.batches_per_epoch is not None:
            self._size = min(number, max(1, run.batches_per_epoch - run.progress.batch + place))
        run.control.scale_loss(1 / self._size, f"one of {self._size} micro-batches", averages=True)
        if self._sums is not None:
            run.control.scale_loss(self._sums.ranks, "each rank's sum is divided once more")

    @on(GradientsReady, lane=Lane.TRANSFORM)
    def rescale(self, run: Run, event: GradientsReady) -> None:
        """Give a window that came out smaller than foreseen its true weight; each optimizer has its own."""
        if run.is_replay or run.window_count is not None:
            return
        if self._sums is not None:
            self._sums.add_up(run)
        factor = self._size / run.window if self._size else 1.0
        if factor != 1.0:
            for parameter in _parameters(run):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


class RankSums:
    """The gradients of a window, added up apart for each of several ranks.

    Args:
        ranks: whose micro-batches come in turn.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._kept: dict[int, list[Any]] = {}
        self._rank = 0

    def turn(self, run: Run, place: int) -> None:
        """Let the next backward pass add to the gradients of the rank whose turn it is."""
        if run.window:
            self._keep(run)
        else:
            self._kept.clear()
        self._rank = place % self.ranks
        kept = self._kept.get(self._rank)
        for number, parameter in enumerate(_parameters(run)):
            parameter.grad = None if kept is None else kept[number]

    def add_up(self, run: Run) -> None:
        """Leave the mean over the ranks in the parameters, at the end of a window."""
        self._keep(run)
        of_ranks = [self._kept[rank] for rank in sorted(self._kept)]
        for number, parameter in enumerate(_parameters(run)):
            parts = [kept[number].mul_(1 / self.ranks) for kept in of_ranks if kept[number] is not None]
            parameter.grad = parts[0] if parts else None
            for part in parts[1:]:
                parameter.grad.add_(part)
        self._kept.clear()

    def _keep(self, run: Run) -> None:
        self._kept[self._rank] = [parameter.grad for parameter in _parameters(run)]


def _parameters(run: Run) -> Iterator[Any]:
    groups = () if run.is_replay else run.optimizer.param_groups  # a replay has no gradients
    return (parameter for group in groups for parameter in group["params"])
