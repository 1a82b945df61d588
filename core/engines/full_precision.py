"""Full precision, the default of engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .options import PrecisionName


class FullPrecision:
    """Full precision with torch's own settings: most methods do nothing. See `Precision`."""

    def __init__(self) -> None:
        self.name: PrecisionName = "fp32"
        self.backward: Callable[[Tensor], None] = Tensor.backward  # without a frame of ours in between, for speed
        self._seeds: dict[tuple[torch.dtype, torch.device, float], Tensor] = {}

    def check(self, device: torch.device) -> None:
        """Raise ValueError unless the device supports the precision."""

    def running(self) -> AbstractContextManager[None]:
        """Return the context of a run, with torch's settings for the precision; it may be nested."""
        return nullcontext()

    def begin(self, device: torch.device, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Begin a run with a new loss scale."""

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return nullcontext()

    def bind(self, forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Return the function as it runs in this precision; itself if nothing changes."""
        return forward

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        """Add the gradients of `scale * loss`, without a multiplication in the graph."""
        if scale == 1.0:
            self.backward(loss)
        else:
            torch.autograd.backward(loss, self._seed(loss, scale))

    def backward_for(self, loss: Tensor, scale: float, parameters: Sequence[Tensor]) -> None:
        """Add the gradients of `scale * loss` to these parameters only."""
        torch.autograd.backward(loss, self._seed(loss, scale), inputs=parameters)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the loss scale from the gradients, without waiting for the device."""

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that steps, and returns False if it skips the step; often the optimizer's own."""
        return optimizer.step

    def bind_zero_grad(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that drops gradients and updates the loss scale; often the optimizer's own."""
        return optimizer.zero_grad

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale for a resumed run."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved loss scale; only fp16 has one."""

    def _seed(self, loss: Tensor, scale: float) -> Tensor:
        # Cached, because creating the tensor may wait for the device.
        key = (loss.dtype, loss.device, scale)
        if key not in self._seeds:
            self._seeds[key] = torch.tensor(scale, dtype=loss.dtype, device=loss.device)
        return self._seeds[key]
