"""The hardware, as the loop and plugins see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .control import Control


class Engine(Protocol):
    """Where and how a run computes. One process on one device is the simplest; others keep the same contract."""

    @property
    def device(self) -> Any:
        """The torch device that modules and batches live on."""

    @property
    def rank(self) -> int:
        """This process among `world_size`, from 0."""

    @property
    def world_size(self) -> int:
        """How many processes train together."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and draws bars."""

    def place(self, modules: Iterable[Any]) -> None:
        """Move modules to the device."""

    def feed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, moved to the device."""

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward function as this engine runs it (under autocast, say)."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, for loops of one's own."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch whose gradients are not yet exchanged."""

    def backward(self, loss: Any) -> None:
        """Add the gradients of a loss."""

    def backward_scaled(self, loss: Any, scale: float) -> None:
        """Add the gradients of `scale * loss`."""

    def unscale(self, optimizer: Any) -> None:
        """Make the gradients true ones before handlers of `GradientsReady` see them."""

    def step(self, optimizer: Any) -> object:
        """Step the optimizer; return False where the engine had to skip it, anything else where it did not."""

    def settle(self, control: Control) -> None:
        """Make the standing requests the same on all ranks."""
