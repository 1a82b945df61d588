"""The device and the processes of a run, as plugins see them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

Reduction = Literal["sum", "mean", "max"]


class Engine(Protocol):
    """The device of a run, and the collectives between its processes.

    `reduce`, `gather`, `gather_objects`, `broadcast`, `barrier` and `vote` are collectives: every rank must call them,
    in the same order. They raise in a handler of a plugin that runs on the main rank only.

    Attributes:
        device: the torch device of modules and batches.
        rank: the rank of this process, from 0 to `world_size` - 1.
        local_rank: the rank of this process among those on its machine, from 0.
        world_size: the number of processes that train together.
        is_main: True for rank 0, the process that writes files and draws progress bars.
        is_local_main: True for local rank 0 of every machine.
    """

    device: Any
    rank: int
    local_rank: int
    world_size: int
    is_main: bool
    is_local_main: bool

    @property
    def waited_seconds(self) -> float:
        """Seconds that this process has spent in collectives so far."""

    def reduce(self, value: Any, how: Reduction = "mean") -> Any:
        """Reduce a number or a tensor over all ranks; return a new value of the same kind.

        Raises:
            TypeError: the value is neither a number nor a tensor, or the mean of integers or bools is requested.
            ValueError: the reduction is unknown.
        """

    def gather(self, tensor: Any) -> list[Any]:
        """Return the tensors of all ranks, ordered by rank.

        The tensors may differ in the length of their first dimension.
        """

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, ordered by rank. They must be picklable."""

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the tensor or object of rank `source` on all ranks."""

    def barrier(self) -> None:
        """Wait until every rank reaches this call."""

    def vote(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks.

        This is one small all-reduce that does not wait for the device.
        """

    def refusing(self, plugin: str, event: str) -> AbstractContextManager[None]:
        """Return a context in which collectives raise, for code on one rank only.

        `plugin` and `event` are named in the error.
        """

    def writing(self) -> AbstractContextManager[None]:
        """Return a context that protects this process while it writes a file.

        In this context, in any thread, the process is not ended because another rank has failed.
        """

    def clip_gradients(self, parameters: Iterable[Any], norm: float | None, norm_type: float = 2.0) -> Any:
        """Clip gradients by their total norm over all shards.

        Args:
            parameters: the parameters with the gradients.
            norm: the maximum total norm; None only measures.
            norm_type: the p of the p-norm.

        Returns:
            The norm before clipping, as a tensor on the device.
        """
