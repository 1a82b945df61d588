"""Notice a loss that is no number."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ..events import BatchStart, GradientsReady, Lane, Run, TrainStart
from ..plugins import Plugin, on


class NaNGuard(Plugin):
    """Look at the loss before every optimizer step, and act when it is NaN or infinite.

    Costs one wait for the device per optimizer step: nobody can skip a step without knowing.

    Args:
        action: `raise` a FloatingPointError, `skip` the step (its gradients are dropped), or `stop` the run (the step
            is dropped too).
        max_skips: with `skip`, how many steps in a row may be dropped before it raises.

    Raises:
        ValueError: the action is unknown, or `max_skips` not positive.
    """

    def __init__(self, action: Literal["raise", "skip", "stop"] = "raise", *, max_skips: int = 10) -> None:
        if action not in ("raise", "skip", "stop"):
            raise ValueError(f"NaNGuard(action) is 'raise', 'skip' or 'stop', got {action!r}.")
        if max_skips < 1:
            raise ValueError(f"max_skips must be at least 1, got {max_skips!r}.")
        self.action, self.max_skips = action, max_skips
        self.asks = ("stop",) if action == "stop" else ()
        self._skips = 0
        self._losses: list[Tensor] = []

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Forget the former run."""
        self._skips = 0
        self._losses = []

    @on(BatchStart)
    def remember(self, run: Run, event: BatchStart) -> None:
        """Keep the losses of a window's earlier micro-batches, on the device."""
        if run.window:
            self._losses.append(run.loss.detach())

    @on(GradientsReady, lane=Lane.TRANSFORM)
    def judge(self, run: Run, event: GradientsReady) -> None:
        """Act on the window's losses."""
        losses = torch.stack([*self._losses, run.loss.detach()])
        self._losses = []
        if bool(torch.isfinite(losses).all()):
            self._skips = 0
            return
        self._skips += 1
        what = f"the loss is {next(loss for loss in losses.tolist() if not math.isfinite(loss))}"
        if self.action == "raise" or self._skips > self.max_skips:
            times = f", {self._skips} windows in a row" if self._skips > 1 else ""
            raise FloatingPointError(
                f"{what} at step {run.progress.steps}{times}: lower the learning rate, clip gradients, check the data."
            )
        run.control.skip_step(what)
        if self.action == "stop":
            run.control.stop(f"{what} at step {run.progress.steps}")
