"""The losses of an accumulation window, looked at before its optimizer step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...events import Run


class WindowLosses:
    """Keeps the loss of each micro-batch of a window, on the device, until the window is complete; by optimizer."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[int, Tensor]]] = {}
        self._batch = 0

    def open_batch(self, run: Run) -> None:
        """At `BatchStart`: keep the losses of the micro-batch before, unless that one was skipped."""
        if run.window:
            windows = run.windows
            for name, loss in run.losses.items():
                self._keep(name, loss, windows[name])
        self._batch = run.progress.batch

    def take_bad(self, run: Run) -> dict[int, float]:
        """At `GradientsReady`: return the losses that are NaN or infinite by their batch's index, and begin anew.

        Waits for the device once.

        Raises:
            RuntimeError: the loop was not given the loss.
        """
        self._keep(run.optimizer_name, run.loss, run.window)
        kept = self._kept.pop(run.optimizer_name)
        if not kept:
            raise RuntimeError(
                "A plugin judges this step by its loss, which a train_function that steps the optimizer itself keeps "
                "from the loop: call iterator.step(loss) in it instead."
            )
        losses = torch.stack([loss for _, loss in kept])
        if bool(torch.isfinite(losses).all()):
            return {}
        pairs = zip(kept, losses.tolist(), strict=True)
        return {batch: loss for (batch, _), loss in pairs if not math.isfinite(loss)}

    def _keep(self, name: str, loss: Tensor, window: int) -> None:
        kept = self._kept.setdefault(name, [])
        if window > len(kept):
            kept.append((self._batch, loss.detach()))
