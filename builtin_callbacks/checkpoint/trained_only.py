"""`TrainedOnly`: checkpoints without frozen weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.checkpoint.state.frozen import FrozenWeights
from ...core.engines.sharded_states import ShardingEngine
from ...core.system.extras import kind_of
from ...events import Lane, Run, TrainStart
from ...plugins import Plugin, on
from .folder import warn_without_saver


class TrainedOnly(Plugin):
    """Omit parameters from checkpoints that require no gradient and have not changed since the run began.

    Use it if most weights are frozen, for example with LoRA. The program that resumes such a checkpoint, or loads its
    weights, must have the same frozen weights, which is verified by digests. Not for an engine that shards weights,
    such as `FSDPEngine`.

    Raises:
        ValueError: at the run's start, the engine shards the weights.
    """

    affects_training = False
    exclusive = ("the state without frozen weights",)

    def __init__(self) -> None:
        self._frozen = FrozenWeights()

    @on(TrainStart, lane=Lane.MEASURE)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Record which weights are frozen."""
        warn_without_saver(run, "TrainedOnly")
        if isinstance(run.engine, ShardingEngine):
            raise ValueError(
                f"TrainedOnly needs an engine with full weights, but {kind_of(run.engine)} shards them: remove the "
                f"plugin, or train with DDPEngine."
            )
        if all(parameter.requires_grad for module in run.modules.values() for parameter in module.parameters()):
            run.warn(
                "TrainedOnly has no effect, because all weights of this task are trained: freeze weights with "
                "requires_grad_(False), or remove the plugin."
            )
        self._frozen.begin(run.modules)

    def reduce_state(self, run: Run, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without the frozen weights, and with their digests."""
        return self._frozen.without(run.modules, state)

    def describe(self, run: Run) -> str:
        """Return what the checkpoints omit."""
        return "leaves frozen weights out of the checkpoints"
