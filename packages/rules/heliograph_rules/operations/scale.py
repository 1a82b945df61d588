"""Operations that scale the learning rate or the loss of a batch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from math import inf

from heliograph import BatchStart, Run
from heliograph.events import Event
from heliograph.spi import is_number, known_names, scale_optimizer, scale_scheduler

from ..base import RuleFiring, RuleOperation
from ..errors import RuleError, show

logger = logging.getLogger("heliograph")


class ScaleLearningRate(RuleOperation):
    """Multiply the learning rate by a factor, now and in the rest of its schedule.

    The scheduler's base rates, maximum rates and `eta_min` are scaled too; the `min_lr` of a plateau scheduler does not
    change. Checkpoints contain the result.

    Args:
        name: the name that controllers use.
        factor: a positive number.
        minimum: a lower bound of the scaled rates. All groups of an optimizer are scaled by the same factor, so their
            ratios stay. A scheduler may go below it later.
        optimizer: the name of an optimizer; by default all of them.

    Raises:
        RuleError: a number is out of range; during the run, the optimizer does not exist.
    """

    shared = True

    def __init__(self, name: str, factor: float, minimum: float = 0.0, optimizer: str | None = None) -> None:
        super().__init__(name)
        if not is_number(factor) or not 0 < factor < inf:
            raise RuleError(f"factor must be a positive number, for example 0.5, got {show(factor)}.")
        if not is_number(minimum) or not 0 <= minimum < inf:
            raise RuleError(f"minimum must be a learning rate of at least 0, got {show(minimum)}.")
        if optimizer is not None and not isinstance(optimizer, str):
            raise RuleError(f"optimizer must be the name of an optimizer, got {show(optimizer)}.")
        self.factor, self.minimum, self.optimizer = factor, minimum, optimizer

    def should_scale(self, run: Run, firing: RuleFiring) -> None:
        optimizers, schedulers = run.optimizers, run.schedulers
        names = list(optimizers) if self.optimizer is None else [self.optimizer]
        for name in names:
            if name not in optimizers:
                raise RuleError(f"Cannot scale optimizer {name!r}: it does not exist.{known_names(name, optimizers)}")
            groups = optimizers[name].param_groups
            factor = self._bound([float(group["lr"]) for group in groups])
            scale_optimizer(optimizers[name], factor)
            if name in schedulers:
                scale_scheduler(schedulers[name], factor)
            rates = ", ".join(f"{float(group['lr']):.6g}" for group in groups)
            logger.info("learning rate of %r scaled by %.6g to %s: %s", name, factor, rates, firing.reason)

    def _bound(self, rates: Iterable[float]) -> float:
        # The minimum never increases a rate.
        bounds = [min(1.0, self.minimum / rate) for rate in rates if rate > 0]
        return max([self.factor, *bounds])


class ScaleLoss(RuleOperation):
    """Multiply the loss of the current micro-batch by a factor, for its backward pass only.

    Args:
        name: the name that controllers use.
        factor: a finite number.

    Raises:
        RuleError: the factor is not a finite number.
    """

    shared = True
    only_on: Mapping[str, tuple[type[Event], ...]] = {"should_scale": (BatchStart,)}
    asks: Mapping[str, str] = {"should_scale": "scale_loss"}

    def __init__(self, name: str, factor: float) -> None:
        super().__init__(name)
        if not is_number(factor) or not -inf < factor < inf:
            raise RuleError(f"factor must be a finite number, for example 0.5, got {show(factor)}.")
        self.factor = factor

    def should_scale(self, run: Run, firing: RuleFiring) -> None:
        run.control.scale_loss(self.factor, firing.reason)
