"""The engine of one process on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..events import Control, Engine


class LoopEngine(Engine, Protocol):
    """The whole contract: what the loop asks of an engine, beside what plugins see."""

    def place(self, modules: Iterable[nn.Module]) -> None:
        """Move modules to the device."""

    def feed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches, moved to the device."""

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward function as this engine runs it (under autocast, say)."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, for loops of one's own."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch whose gradients are not yet exchanged."""

    def backward(self, loss: Tensor, /) -> None:
        """Add the gradients of a loss."""

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        """Add the gradients of `scale * loss`."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients true ones before handlers of `GradientsReady` see them."""

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that steps the optimizer, and returns False where it had to skip that."""

    def settle(self, control: Control) -> None:
        """Make the standing requests the same on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs of the engine (the scale of a gradient scaler, say), as plain types."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; an empty one is of an engine that has none."""


class DeviceEngine:
    """One process, one device, full precision.

    Args:
        device: `cpu`, `cuda`, `cuda:1` and the like; by default a GPU where there is one.

    Raises:
        ValueError: the device is unknown, or not to be had on this machine.
    """

    rank = 0
    world_size = 1
    is_main = True

    def __init__(self, device: str | torch.device | None = None) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"Unknown device {device!r}: {error}") from None
        if self.device.type == "cuda" and (self.device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"Device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices.")
        self._seeds: dict[tuple[torch.dtype, float], Tensor] = {}

    def place(self, modules: Iterable[nn.Module]) -> None:
        """Move modules to the device."""
        for module in modules:
            module.to(self.device)

    def feed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, moved to the device."""
        if self.device.type == "cpu":
            return batches
        return (move(batch, self.device) for batch in batches)

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward function as it is: full precision needs no autocast."""
        return forward

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: one process exchanges no gradients."""
        return nullcontext()

    backward = staticmethod(Tensor.backward)  # called once a step: no Python frame of ours in between

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        """Add the gradients of `scale * loss`, without a multiplication in the graph."""
        if scale == 1.0:
            self.backward(loss)
            return
        seed = self._seeds.get((loss.dtype, scale))
        if seed is None:
            seed = self._seeds[loss.dtype, scale] = torch.tensor(scale, dtype=loss.dtype, device=loss.device)
        loss.backward(seed)  # type: ignore[no-untyped-call]  # torch has no annotation here

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the gradients as they are: nothing scaled them."""

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return the optimizer's own step: nothing ever makes it skip."""
        return optimizer.step

    def settle(self, control: Control) -> None:
        """Leave the requests as they are: one process agrees with itself."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: full precision scales nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""


def move(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device; looks into tuples (named ones too), lists and dicts."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(each, device) for each in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(each, device) for each in batch)
    if isinstance(batch, dict):
        return type(batch)((key, move(value, device)) for key, value in batch.items())
    return batch
