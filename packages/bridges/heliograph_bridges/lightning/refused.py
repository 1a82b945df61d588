"""Unsupported callbacks of Lightning, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from heliograph import Run
from heliograph.spi import with_article

from .flavour import Flavour

_SAVES = "saves checkpoints of Lightning's Trainer, whose state differs from a Heliograph run"
_TUNES = "runs the loop of Lightning's Trainer before the training"
_THAWS = "adds parameter groups to the optimizer during the training, so that a resume could not load its state"


REFUSED: Final[Mapping[str, tuple[str, str]]] = {  # why, and the replacement
    "Checkpoint": (_SAVES, "heliograph.Checkpoint(folder)"),
    "ModelCheckpoint": (_SAVES, "heliograph.Checkpoint(folder, monitor=..., keep_best=3)"),
    "OnExceptionCheckpoint": (_SAVES, "heliograph.Checkpoint(folder), and Preemption(folder) for signals"),
    "ProgressBar": ("draws the loops of Lightning's Trainer", "heliograph.ProgressBar()"),
    "TQDMProgressBar": ("draws the loops of Lightning's Trainer", "heliograph.ProgressBar()"),
    "RichProgressBar": ("draws the loops of Lightning's Trainer", "heliograph.ProgressBar()"),
    "BatchSizeFinder": (_TUNES, "heliograph.tuning.find_batch_size(trainer, task, data, largest=...)"),
    "LearningRateFinder": (_TUNES, "heliograph.tuning.find_learning_rate(trainer, task, data, optimizer=...)"),
    "GradientAccumulationScheduler": (
        "sets how many batches Lightning's loop accumulates",
        "heliograph.GradientAccumulation({0: 1, 5: 4})",
    ),
    "BasePredictionWriter": (
        "reads the indices of samples from Lightning's predict loop",
        "heliograph.PredictionWriter(folder)",
    ),
    "ThroughputMonitor": (
        "counts in the progress objects of Lightning's loops",
        "heliograph.ProgressBar() and LogSchedule(steps=50), which show samples per second",
    ),
    "SpikeDetection": (
        "waits for the device at every step, and writes a file of batches for Lightning's Trainer",
        'heliograph.NaNGuard("skip_step") or RollBack',
    ),
    "StochasticWeightAveraging": (
        "replaces the schedulers and adds an epoch without steps to the loop of Lightning's Trainer",
        "heliograph.EMA()",
    ),
    "BaseFinetuning": (_THAWS, "give fit an optimizer with all groups, and set requires_grad at EpochStart"),
    "BackboneFinetuning": (_THAWS, "give fit an optimizer with all groups, and set requires_grad at EpochStart"),
    "ModelPruning": (
        "renames the parameters that it prunes, so that a new model could not load a checkpoint",
        "torch.nn.utils.prune before fit, or after it",
    ),
}


def check_served(callback: Any) -> None:
    for kind in type(callback).__mro__:
        if kind.__name__ in REFUSED and kind.__module__.startswith(("lightning.", "pytorch_lightning.")):
            name = type(callback).__name__
            label = name if kind.__name__ == name else f"{name}, {with_article(kind.__name__)},"
            why, instead = REFUSED[kind.__name__]
            raise ValueError(f"{label} cannot run here: it {why}. Use {instead}.")


def is_shipped(callback: Any, flavour: Flavour, name: str) -> bool:
    return isinstance(callback, flavour.part("callbacks", name))


def check_averaging(callback: Any, flavour: Flavour, run: Run) -> None:
    if not is_shipped(callback, flavour, "WeightAveraging"):
        return
    from torch.distributed.tensor import DTensor

    if any(isinstance(weight, DTensor) for module in run.modules.values() for weight in module.parameters()):
        name = type(callback).__name__
        raise ValueError(f"{name} copies the model, but its weights are sharded. Use heliograph.EMA().")
