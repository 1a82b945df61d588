"""The losses of a window: on their way to the host while their backward passes run, judged before the step."""

from __future__ import annotations

import math
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ...events import Run


class WindowLosses:
    """Keeps the loss of each micro-batch of a window until the window is complete; by optimizer.

    The copy of a loss begins before its backward pass, so reading it waits for the forward pass only. A loop that has
    no `ForwardEnd` begins it later.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[int, Fetched]]] = {}
        self._begun: list[tuple[ReferenceType[Tensor], Fetched]] = []  # whose optimizers are not known yet
        self._batch = 0

    def open_batch(self, run: Run) -> None:
        """At `BatchStart`: keep the losses of the micro-batch before, unless that one was skipped."""
        if run.stepping.window:
            windows = run.stepping.windows
            for name, loss in run.stepping.losses.items():
                self._keep(name, loss, windows[name])
        self._begun.clear()
        self._batch = run.progress.batch

    def fetch(self, run: Run) -> None:
        """At `ForwardEnd`: begin to copy the loss to the host."""
        self._begun.append((ref(run.loss), Fetched(run.loss)))

    def take_bad(self, run: Run) -> dict[int, float]:
        """At `GradientsReady`: return the losses that are NaN or infinite by their batch's index, and start again.

        Raises:
            RuntimeError: the loop was not given the loss.
        """
        self._keep(run.stepping.optimizer_name, run.loss, run.stepping.window)
        kept = self._kept.pop(run.stepping.optimizer_name)
        if not kept:
            raise RuntimeError(
                "A plugin judges this step by its loss, which the loop was not given: call run.step(loss) instead of "
                "run.step_with_gradients; in a train_function, call iterator.step(loss)."
            )
        losses = {batch: loss.read() for batch, loss in kept}
        return {batch: loss for batch, loss in losses.items() if not math.isfinite(loss)}

    def _keep(self, name: str, loss: Tensor, window: int) -> None:
        kept = self._kept.setdefault(name, [])
        if window > len(kept):
            begun = next((fetched for original, fetched in self._begun if original() is loss), None)
            kept.append((self._batch, begun or Fetched(loss)))


class Fetched:
    """A tensor on its way to the host: from a GPU without a wait, from elsewhere when it is read."""

    __slots__ = ("_arrival", "_copy")

    def __init__(self, tensor: Tensor) -> None:
        self._copy, self._arrival = tensor.detach(), None
        if tensor.is_cuda:
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy = on_host.copy_(self._copy, non_blocking=True)
            self._arrival = torch.cuda.current_stream(tensor.device).record_event()

    @property
    def is_there(self) -> bool:
        """Whether it can be read without a wait, as far as that is known."""
        return self._arrival is None or self._arrival.query()

    def read(self) -> Any:
        """Return its numbers, a single one or a list of them, and wait for it where it is not there yet."""
        return self.wait().tolist()

    def wait(self) -> Tensor:
        """Return it as it arrived, and wait for it where it is not there yet."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy
