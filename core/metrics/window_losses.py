"""The losses of a window: copied to the host during the backward pass, checked before the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...events import Run


class WindowLosses:
    """The losses of the micro-batches of a window by optimizer, until the window is complete.

    The copy of a loss begins before its backward pass, so reading it waits for the forward pass only. In a loop without
    `ForwardEnd` it begins later.
    """

    def __init__(self) -> None:
        self._losses: dict[str, list[tuple[int, Fetched]]] = {}
        self._begun: list[tuple[ReferenceType[Tensor], Fetched]] = []  # whose optimizers are unknown so far
        self._batch = 0

    def open_batch(self, run: Run) -> None:
        # At `BatchStart`: adds the losses of the previous micro-batch, unless it was skipped.
        if run.stepping.window:
            windows = run.stepping.windows
            for name, loss in run.stepping.losses.items():
                self._add(name, loss, windows[name])
        self._begun.clear()
        self._batch = run.progress.batch

    def fetch(self, run: Run) -> None:
        self._begun.append((ref(run.loss), Fetched(run.loss)))

    def take_bad(self, run: Run) -> dict[int, float]:
        """Return the NaN and infinite losses by batch index, and clear the window. Call it at `GradientsReady`.

        Raises:
            RuntimeError: the loop did not get the loss.
        """
        self._add(run.stepping.optimizer_name, run.loss, run.stepping.window)
        fetched = self._losses.pop(run.stepping.optimizer_name)
        if not fetched:
            raise RuntimeError(
                "A plugin checks the loss of this step, but the loop did not get it: call run.step(loss) instead of "
                "run.step_with_gradients; in a train_function, call iterator.step(loss)."
            )
        losses = {batch: loss.read() for batch, loss in fetched}
        return {batch: loss for batch, loss in losses.items() if not math.isfinite(loss)}

    def _add(self, name: str, loss: Tensor, window: int) -> None:
        losses = self._losses.setdefault(name, [])
        if window > len(losses):
            begun = next((fetched for original, fetched in self._begun if original() is loss), None)
            losses.append((self._batch, begun or Fetched(loss)))


class Fetched:
    """A tensor on its way to the host: from a GPU without a wait, from other devices when it is read."""

    __slots__ = ("_arrival", "_copy")

    def __init__(self, tensor: Tensor) -> None:
        self._copy, self._arrival = tensor.detach(), None
        if tensor.is_cuda:
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy = on_host.copy_(self._copy, non_blocking=True)
            self._arrival = torch.cuda.current_stream(tensor.device).record_event()

    @property
    def is_there(self) -> bool:
        # As far as that is known.
        return self._arrival is None or self._arrival.query()

    def read(self) -> Any:
        return self.wait().tolist()

    def wait(self) -> Tensor:
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy
