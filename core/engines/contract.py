"""The whole contract of engines: what the loop calls, besides what plugins see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ...events import Engine

if TYPE_CHECKING:
    from ..distributed.ranks.watch import Watch


class LoopEngine(Engine, Protocol):
    """What an engine does. Inherit from an existing one, or write all of it.

    The order of a run: `process()` is entered, `set_up`, then training and evaluation, `tear_down`, `process()` is
    left; after a failure, `abandon` instead of `tear_down`.
    """

    # Life.

    def process(self) -> AbstractContextManager[None]:
        """Return a context in which this process belongs to its group; entered again within itself, it does nothing."""

    def set_up(
        self, task: Any, modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        """Move and wrap what is trained; the modules and optimizers stay the user's own objects.

        Args:
            task: the user's model code, whose attributes the modules are.
            modules: by attribute name.
            optimizers: by name; none where nothing is trained. Their parameters are made to be the modules' again,
                where these were replaced.
        """

    def tear_down(self) -> None:
        """Take the wrappers off: the user's modules hold plain tensors again. A collective."""

    def abandon(self) -> None:
        """Leave the group at once and without a collective, so that no peer waits for this rank; take wrappers off."""

    # Batches.

    def move(self, batch: Any) -> Any:
        """Return a batch on the device."""

    def feed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches, moved to the device."""

    # A step.

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a training step as this engine runs it: under autocast, with gradients exchanged after it.

        One that yields several losses is still a generator then: the loop enters `autocast` around each of its parts,
        and calls `backward_for` and `exchange_gradients`.
        """

    def bind_evaluation(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a validation or test step as this engine runs it."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context of a validation or test. Entering it may be a collective (buffers made equal)."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, for loops of one's own."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch whose gradients are not yet exchanged."""

    def backward(self, loss: Tensor, /) -> None:
        """Add the gradients of a loss."""

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        """Add the gradients of `scale * loss`."""

    def backward_for(self, loss: Tensor, scale: float, parameters: Sequence[Tensor]) -> None:
        """Add the gradients of `scale * loss` to these parameters only; they are not exchanged."""

    def exchange_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average over all ranks the gradients that `backward_for` left."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients true ones before handlers of `GradientsReady` see them."""

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that steps the optimizer, and returns False where it had to skip that."""

    def bind_zero_grad(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that drops the gradients of an optimizer's parameters."""

    # Ranks.

    @property
    def watch(self) -> Watch | None:
        """Reports a failure to the other ranks, and receives theirs; None for one process and outside of a group."""

    # State.

    def pack(
        self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states of modules and optimizers by name, whole and without a trace of wrappers. A collective.

        Where they are gathered, only the main rank gets them; the others get empty ones.
        """

    def unpack(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        states: tuple[Mapping[str, Any], Mapping[str, Any]],
    ) -> None:
        """Load what `pack` returned; every rank has the whole of it."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs of the engine (the scale of a gradient scaler, say), as plain types."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; an empty one is of an engine that has none."""
