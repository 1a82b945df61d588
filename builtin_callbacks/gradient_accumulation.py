"""Step the optimizer once for several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import fsum, inf, log2
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

    Where a loss is not a mean over all samples of its batch (tokens that are left out, samples of unequal length), give
    the `weight` of each: the gradient is then the weighted mean over the window, of all ranks, as if it had been one
    batch. A window whose weights are all zero is not stepped. A loss must be finite
    where its weight is zero, too. A weight on a GPU is waited for. Then do not toggle the plugin in a window.

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
            number or a tensor of one, at least 0. None weighs all batches alike.

    Raises:
        TypeError: `weight` cannot be called.
        ValueError: n is not positive, no multiple of `as_ranks`, or the schedule does not begin at epoch 0; in a run, a
            weight is negative or not finite.
        RuntimeError: with `weight`, the plugin was toggled in a window.
    """

    exclusive = ("accumulation",)

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
        self.asks = () if weight is None else ("skip_step",)
        self._weights: WindowWeights | None = None
        self._is_weighed = False  # the window under way

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
        self._weights = None if self.weight is None or run.is_replay else WindowWeights(self.weight)
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

    @on(BatchStart)
    def weigh(self, run: Run, event: BatchStart) -> None:
        """Scale the loss, and hold the step until the window is full."""
        number = self.number(run.progress.epoch)
        self._is_weighed = self._weights is not None and (number > 1 or run.engine.world_size > 1)
        if self._is_weighed and self._weights is not None:
            self._weights.open_batch(run)
        place, self._size = run.progress.batch % number, 0
        if self._sums is not None and number > 1:
            self._sums.turn(run, place)
        if place + 1 < number:
            run.control.hold_step(f"windows of {number} micro-batches")
        if number == 1 or self._is_weighed:
            return
        self._size = number
        if run.batches_per_epoch is not None:
            self._size = min(number, max(1, run.batches_per_epoch - run.progress.batch + place))
        parts = 1 if self._sums is None else self._sums.ranks  # each rank's sum is divided once more
        run.control.scale_loss(parts / self._size, f"one of {self._size} micro-batches")

    @on(GradientsReady, lane=Lane.TRANSFORM)
    def rescale(self, run: Run, event: GradientsReady) -> None:
        """Give a window that came out smaller than foreseen its true weight; each optimizer has its own."""
        if self._sums is not None:
            self._sums.add_up(run)
        if self._is_weighed and self._weights is not None:
            parts = run.engine.world_size if self._sums is None else self._sums.ranks
            factor = self._weights.factor(run, parts)
            if not factor:
                run.control.skip_step("the weights of its micro-batches are all zero")
                return
        else:
            factor = self._size / run.window if self._size else 1.0
        if factor != 1.0:
            for parameter in _parameters(run):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


class WindowWeights:
    """The weights of the micro-batches of each optimizer's window.

    A loss is scaled by its weight, in units of a power of two near the first weight: no gradient becomes large, and no
    bit depends on the unit.

    Args:
        weigh: returns the weight of a batch.
    """

    def __init__(self, weigh: Callable[[Any], Any]) -> None:
        self._weigh = weigh
        self._unit = 0.0
        self._kept: dict[str, list[float]] = {}
        self._weight = 0.0

    def open_batch(self, run: Run) -> None:
        """At `BatchStart`: keep the weight of the micro-batch before, unless it was skipped; scale the loss of this."""
        for name, size in run.windows.items():
            self._keep(name, size)
        weight = float(self._weigh(run.batch))
        if not 0 <= weight < inf:
            raise ValueError(f"The weight of a batch is a finite number, at least 0; got {weight}.")
        if not self._unit:
            first = float(run.engine.reduce(weight, "max"))
            self._unit = 2.0 ** round(log2(first)) if first else 1.0
        self._weight = weight
        run.control.scale_loss(weight / self._unit, f"a weight of {weight:.6g}")

    def factor(self, run: Run, parts: int) -> float:
        """At `GradientsReady`: return what makes the gradients a weighted mean over all ranks; 0 without any weight.

        Args:
            run: the run.
            parts: over how many sums of gradients the mean was taken.
        """
        self._keep(run.optimizer_name, run.window)
        kept = self._kept.pop(run.optimizer_name)
        if len(kept) != run.window:
            raise RuntimeError(
                f"GradientAccumulation(weight=...) knows the weights of {len(kept)} of {run.window} micro-batches: "
                f"do not toggle it in a window."
            )
        total = float(run.engine.reduce(fsum(kept), "sum"))
        return parts * self._unit / total if total else 0.0

    def _keep(self, name: str, size: int) -> None:
        kept = self._kept.setdefault(name, [])
        if not size:
            kept.clear()
        elif size > len(kept):
            kept.append(self._weight)


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
        """Leave the mean over the ranks in the parameters."""
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
