"""Unsupported callbacks of Lightning, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from heliograph import Run
from heliograph.spi import with_article

from .flavour import Flavour

_SAVES = "saves checkpoints of Lightning's Trainer, whose state differs from a Heliograph run"
_TUNES = "runs the loop of Lightning's Trainer before the training"
_THAWS = "adds parameter groups to the optimizer during the training, so that a resume could not load its state"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a callback is not supported.

    Attributes:
        why: the reason, as the end of a sentence about the callback.
        instead: the replacement.
    """

    why: str
    instead: str


REFUSED: Final[Mapping[str, Refusal]] = {
    "Checkpoint": Refusal(_SAVES, "heliograph.Checkpoint(folder)"),
    "ModelCheckpoint": Refusal(_SAVES, "heliograph.Checkpoint(folder, monitor=..., keep_best=3)"),
    "OnExceptionCheckpoint": Refusal(_SAVES, "heliograph.Checkpoint(folder), and Preemption(folder) for signals"),
    "ProgressBar": Refusal("draws the loops of Lightning's Trainer", "heliograph.ProgressBar()"),
    "TQDMProgressBar": Refusal("draws the loops of Lightning's Trainer", "heliograph.ProgressBar()"),
    "RichProgressBar": Refusal("draws the loops of Lightning's Trainer", "heliograph.ProgressBar()"),
    "BatchSizeFinder": Refusal(_TUNES, "heliograph.tuning.find_batch_size(trainer, task, data, largest=...)"),
    "LearningRateFinder": Refusal(_TUNES, "heliograph.tuning.find_learning_rate(trainer, task, data, optimizer=...)"),
    "GradientAccumulationScheduler": Refusal(
        "sets how many batches Lightning's loop accumulates", "heliograph.GradientAccumulation({0: 1, 5: 4})"
    ),
    "BasePredictionWriter": Refusal(
        "reads the indices of samples from Lightning's predict loop", "heliograph.PredictionWriter(folder)"
    ),
    "ThroughputMonitor": Refusal(
        "counts in the progress objects of Lightning's loops",
        "heliograph.ProgressBar() and LogSchedule(steps=50), which show samples per second",
    ),
    "SpikeDetection": Refusal(
        "waits for the device at every step, and writes a file of batches for Lightning's Trainer",
        'heliograph.NaNGuard("skip_step") or RollBack',
    ),
    "StochasticWeightAveraging": Refusal(
        "replaces the schedulers and adds an epoch without steps to the loop of Lightning's Trainer", "heliograph.EMA()"
    ),
    "BaseFinetuning": Refusal(_THAWS, "give fit an optimizer with all groups, and set requires_grad at EpochStart"),
    "BackboneFinetuning": Refusal(_THAWS, "give fit an optimizer with all groups, and set requires_grad at EpochStart"),
    "ModelPruning": Refusal(
        "renames the parameters that it prunes, so that a new model could not load a checkpoint",
        "torch.nn.utils.prune before fit, or after it",
    ),
}


def check_served(callback: Any) -> None:
    for kind in type(callback).__mro__:
        refusal = REFUSED.get(kind.__name__)
        if refusal is not None and kind.__module__.startswith(("lightning.", "pytorch_lightning.")):
            name = type(callback).__name__
            label = name if kind.__name__ == name else f"{name}, {with_article(kind.__name__)},"
            raise ValueError(f"{label} cannot run here: it {refusal.why}. Use {refusal.instead}.")


def is_shipped(callback: Any, flavour: Flavour, name: str) -> bool:
    return isinstance(callback, flavour.part("callbacks", name))


def check_averaging(callback: Any, flavour: Flavour, run: Run) -> None:
    if not is_shipped(callback, flavour, "WeightAveraging"):
        return
    from torch.distributed.tensor import DTensor

    if any(isinstance(weight, DTensor) for module in run.modules.values() for weight in module.parameters()):
        name = type(callback).__name__
        raise ValueError(f"{name} copies the model, but its weights are sharded. Use heliograph.EMA().")
