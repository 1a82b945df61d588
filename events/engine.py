"""The hardware and the other processes, as plugins see them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

Reduction = Literal["sum", "mean", "max"]


class Engine(Protocol):
    """Where a run computes, and with whom.

    `reduce`, `gather`, `gather_objects`, `broadcast`, `barrier` and `vote` are collectives: every rank must call them,
    in the same order. Within a handler of a plugin that runs on the main rank only they are refused.

    Attributes:
        device: the torch device that modules and batches live on.
        rank: this process among `world_size`, from 0.
        local_rank: this process among those on its machine, from 0.
        world_size: how many processes train together.
        is_main: whether this process writes files and draws bars: rank 0.
        is_local_main: whether it does so for its machine: local rank 0.
    """

    device: Any
    rank: int
    local_rank: int
    world_size: int
    is_main: bool
    is_local_main: bool

    @property
    def waited_seconds(self) -> float:
        """How long this process was in the collectives above so far."""

    def reduce(self, value: Any, how: Reduction = "mean") -> Any:
        """Return a tensor (a new one) or a number, reduced over all ranks; of the same kind on one as on several.

        Raises:
            TypeError: the value is neither, or a tensor of whole numbers or bools, which have no mean.
            ValueError: there is no such reduction.
        """

    def gather(self, tensor: Any) -> list[Any]:
        """Return the tensors of all ranks, by rank; they may differ in the length of their first dimension."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, by rank; any that can be pickled."""

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the tensor or object of one rank on all ranks."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def vote(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks: one small all-reduce that does not wait for the device."""

    def refusing(self, plugin: str, event: str) -> AbstractContextManager[None]:
        """Return a context in which collectives are refused: what runs in it, in this plugin, is on one rank only."""

    def writing(self) -> AbstractContextManager[None]:
        """Return a context, for any thread, in which this process is not ended because another rank has failed."""

    def clip_gradients(self, parameters: Iterable[Any], norm: float | None, norm_type: float = 2.0) -> Any:
        """Clip gradients by their total norm, over all shards; return the norm before, as a tensor, without a wait.

        Args:
            parameters: whose gradients.
            norm: the largest total norm; None only measures.
            norm_type: the p of the p-norm.
        """
