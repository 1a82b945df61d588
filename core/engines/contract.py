"""The complete protocol of engines: what the loop calls in addition to the part for plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ...events import Engine

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..distributed.watch import Watch


Modules = Mapping[str, nn.Module]  # of a task, by name
Optimizers = Mapping[str, torch.optim.Optimizer]
SavedStates = tuple[Mapping[str, Any], Mapping[str, Any]]  # of modules and of optimizers, by name
Read = Callable[[dict[str, Tensor]], object]


class LoopEngine(Engine, Protocol):
    """What an engine does. Inherit from an existing engine, or implement all methods.

    The order of a run: enter `process()`, `set_up`, training and evaluation, `tear_down`, leave `process()`. After a
    failure, `abandon` instead of `tear_down`.
    """

    # Life.

    def process(self) -> AbstractContextManager[None]:
        """Return a context in which this process belongs to its group; entering it again within itself does nothing."""

    def set_up(self, task: Any, modules: Modules, optimizers: Optimizers) -> None:
        """Move and wrap the trained modules; modules and optimizers remain the user's own objects.

        Args:
            task: the user's model code, whose attributes the modules are.
            modules: by attribute name.
            optimizers: by name; empty without training. If parameters of the modules were replaced, the optimizers get
                the new ones.
        """

    def tear_down(self) -> None:
        """Remove the wrappers: the user's modules hold plain tensors again. A collective."""

    def abandon(self) -> None:
        """Leave the group at once, without a collective, so that no rank waits for this one; remove wrappers."""

    # Batches.

    def move(self, batch: Any) -> Any:
        """Return a batch on the device."""

    def feed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches, moved to the device."""

    # A step.

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a training step as this engine runs it: under autocast, with gradients exchanged after it.

        A step that yields several losses remains a generator: the loop enters `autocast` around each of its parts, and
        calls `backward_for` and `exchange_gradients`.
        """

    def bind_evaluation(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a validation or test step as this engine runs it."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context of a validation or test. Entering it may be a collective, for example to share buffers."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, for the user's own loop."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch whose gradients are not exchanged yet."""

    def backward(self, loss: Tensor, /) -> None:
        """Add the gradients of a loss."""

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        """Add the gradients of `scale * loss`."""

    def backward_for(self, loss: Tensor, scale: float, parameters: Sequence[Tensor]) -> None:
        """Add the gradients of `scale * loss` to these parameters only; they are not exchanged."""

    def exchange_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average over all ranks the gradients of `backward_for`."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the loss scale from the gradients before handlers of `GradientsReady` read them."""

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that steps the optimizer, and returns False if it had to skip the step."""

    def bind_zero_grad(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that drops the gradients of an optimizer's parameters."""

    # Ranks.

    @property
    def watch(self) -> Watch | None:
        """Reports a failure to the other ranks, and receives theirs; None for one process and outside of a group."""

    # State.

    def pack(self, modules: Modules, optimizers: Optimizers) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the complete states of modules and optimizers by name, without traces of wrappers. A collective.

        If states are gathered, only the main rank gets them; the other ranks get empty ones.
        """

    def unpack(self, modules: Modules, optimizers: Optimizers, states: SavedStates) -> None:
        """Load the states that `pack` returned; every rank has all of them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state for a resumed run as plain types, for example the loss scale."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; an empty one comes from an engine without state."""


class ShardingEngine(Protocol):
    """An engine whose ranks each have a part of the state and can save it; `is_sharding` recognizes one.

    Attributes:
        state: the contents of a checkpoint: `full`, as `pack` returns it, or `sharded`.
    """

    state: Literal["full", "sharded"]

    def shard_state(self, modules: Modules, optimizers: Optimizers) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's tensors by name, for `dcp.save`, and the rest, which is the same on all ranks.

        The tensors are the live ones: `dcp.save` writes them, and `dcp.async_save` copies them, before it returns.
        """

    def saving_group(self) -> ProcessGroup:
        """Return a gloo group for exclusive use, so that a thread can save in it. A collective when first called.

        Saving must end before the run ends, because the group ends with it.
        """

    def load_shard_state(self, modules: Modules, optimizers: Optimizers, rest: Mapping[str, Any], read: Read) -> None:
        """Load the result of `shard_state`, saved by any number of ranks. A collective.

        Args:
            modules: by attribute name; of the same shapes.
            optimizers: by name; of the same kinds.
            rest: as `shard_state` returned it.
            read: fills tensors in place, as `dcp.load` does. Some of them are the live weights.
        """
