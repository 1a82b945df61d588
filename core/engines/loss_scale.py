"""The scaling of losses in fp16, so that small gradients do not vanish."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer


class LossScaling:
    """torch's gradient scaler as a run uses it, with one scale for all optimizers.

    The scale stays as it is while any gradients are left that were computed with it: it moves when the gradients of an
    optimizer are dropped and no other optimizer has any. Thus it moves behind each step where steps follow one another,
    and once for all of them where several optimizers end their windows together.

    Args:
        device_type: `cuda`, `cpu` and the like.
        optimizers: those of the run.
    """

    def __init__(self, device_type: str, optimizers: Iterable[Optimizer] = ()) -> None:
        self.scaler = torch.amp.GradScaler(device_type)
        self._optimizers = tuple(optimizers)
        self._open: dict[Optimizer, _Window] = {}
        self._closed: list[_Window] = []  # the scaler knows them by their id: kept, so that none is given twice

    def scale(self, tensor: Tensor) -> Tensor:
        """Return a loss, or what its gradients begin with, times the scale."""
        return self.scaler.scale(tensor)

    def unscale(self, optimizer: Optimizer) -> None:
        """Make the gradients true ones, once per window; without a wait for the device."""
        if optimizer not in self._open:
            window = self._open[optimizer] = _Window(optimizer)
            self.scaler.unscale_(cast(Optimizer, window))

    def step(self, optimizer: Optimizer) -> bool:
        """Step unless a gradient is infinite or NaN; return whether it stepped. Waits for the device once, for that."""
        self.unscale(optimizer)
        window = self._open[optimizer]
        self.scaler.step(cast(Optimizer, window))
        return window.stepped

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients, and let the scale move where none are left; without a wait for the device."""
        optimizer.zero_grad()
        window = self._open.pop(optimizer, None)
        if window is not None:
            self._closed.append(window)
        if self._closed and not any(map(_has_gradients, self._optimizers)):
            self.scaler.update()
            self._closed.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and how long it has held."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved scale."""
        self.scaler.load_state_dict(dict(state))


class _Window:
    """An optimizer as the scaler sees it for one window.

    A fused optimizer would otherwise decide on the device whether it steps, and nobody could count the skipped steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.stepped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.stepped = True
        self.optimizer.step()


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(each.grad is not None for group in optimizer.param_groups for each in group["params"])
