"""Full precision, in which most engines compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .options import PrecisionName


class FullPrecision:
    """What an engine does in full precision: nothing; torch's own settings hold. See `Precision`."""

    def __init__(self) -> None:
        self.name: PrecisionName = "fp32"
        self.backward: Callable[[Tensor], None] = Tensor.backward  # once a step: no frame of ours in between
        self._seeds: dict[tuple[torch.dtype, torch.device, float], Tensor] = {}

    def check(self, device: torch.device) -> None:
        """Raise ValueError unless a device computes so."""

    def running(self) -> AbstractContextManager[None]:
        """Return the context of a run: it sets torch's settings, and restores them; may be entered within itself."""
        return nullcontext()

    def begin(self, device: torch.device, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Begin a run, with a scale of its own."""

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return nullcontext()

    def bind(self, forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Return the function as it is run in this precision; itself where there is nothing to do."""
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
        """Make the gradients true ones; without a wait for the device."""

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that steps, and returns False where it skips that; often the optimizer's own."""
        return optimizer.step

    def bind_zero_grad(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that drops gradients, and updates the scale; often the optimizer's own."""
        return optimizer.zero_grad

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs of the scale."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved scale; one of a run in fp16 has no meaning in another precision."""

    def _seed(self, loss: Tensor, scale: float) -> Tensor:
        """Return what the gradients of `scale * loss` begin with; made once: making it may wait for the device."""
        key = (loss.dtype, loss.device, scale)
        if key not in self._seeds:
            self._seeds[key] = torch.tensor(scale, dtype=loss.dtype, device=loss.device)
        return self._seeds[key]
