"""Scale the learning rate from a rule, so that the schedule continues from there; or the loss of a batch."""

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
    """Multiply the learning rate by a factor, now and in whatever its scheduler makes of it from now on.

    The scheduler's base rates, their maxima and `eta_min` are scaled with it; a plateau scheduler's `min_lr` stays the
    bound that it is. A checkpoint keeps all of them.

    Args:
        name: what controllers call the operation.
        factor: a positive number.
        minimum: what no rate of the optimizer is brought below by this; its groups are scaled by one factor, so that
            their rates keep their ratios. What a scheduler does later is not bounded.
        optimizer: the name of the optimizer, of several; all of them by default.

    Raises:
        RuleError: a number is out of its range; when it acts, there is no optimizer of this name.
    """

    shared = True

    def __init__(self, name: str, factor: float, minimum: float = 0.0, optimizer: str | None = None) -> None:
        super().__init__(name)
        if not is_number(factor) or not 0 < factor < inf:
            raise RuleError(f"factor is a positive number, such as 0.5, got {show(factor)}.")
        if not is_number(minimum) or not 0 <= minimum < inf:
            raise RuleError(f"minimum is a learning rate, at least 0, got {show(minimum)}.")
        if optimizer is not None and not isinstance(optimizer, str):
            raise RuleError(f"optimizer is the name of an optimizer, got {show(optimizer)}.")
        self.factor, self.minimum, self.optimizer = factor, minimum, optimizer

    def should_scale(self, run: Run, firing: RuleFiring) -> None:
        """Scale."""
        optimizers, schedulers = run.optimizers, run.schedulers
        names = list(optimizers) if self.optimizer is None else [self.optimizer]
        for name in names:
            if name not in optimizers:
                raise RuleError(f"There is no optimizer {name!r} to scale.{known_names(name, optimizers)}")
            groups = optimizers[name].param_groups
            factor = self._bound([float(group["lr"]) for group in groups])
            scale_optimizer(optimizers[name], factor)
            if name in schedulers:
                scale_scheduler(schedulers[name], factor)
            rates = ", ".join(f"{float(group['lr']):.6g}" for group in groups)
            logger.info("learning rate of %r times %.6g is %s: %s", name, factor, rates, firing.reason)

    def _bound(self, rates: Iterable[float]) -> float:
        """Return the factor, nearer to 1 where it would bring a rate below the minimum."""
        bounds = [min(1.0, self.minimum / rate) for rate in rates if rate > 0]
        return max([self.factor, *bounds])


class ScaleLoss(RuleOperation):
    """Multiply the loss of the micro-batch that begins by a factor, for its backward pass only.

    Args:
        name: what controllers call the operation.
        factor: a finite number.

    Raises:
        RuleError: it is not such a number.
    """

    shared = True
    only_on: Mapping[str, tuple[type[Event], ...]] = {"should_scale": (BatchStart,)}
    asks: Mapping[str, str] = {"should_scale": "scale_loss"}

    def __init__(self, name: str, factor: float) -> None:
        super().__init__(name)
        if not is_number(factor) or not -inf < factor < inf:
            raise RuleError(f"factor is a number, such as 0.5, got {show(factor)}.")
        self.factor = factor

    def should_scale(self, run: Run, firing: RuleFiring) -> None:
        """Scale."""
        run.control.scale_loss(self.factor, firing.reason)
