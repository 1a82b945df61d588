"""Callbacks of Lightning that do not run here, why, and what of Heliograph does their work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from heliograph import Run
from heliograph.spi import with_article

from .flavour import Flavour


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a callback is refused.

    Attributes:
        why: the reason, as the rest of a sentence that begins with the callback's name.
        instead: what does its work here.
    """

    why: str
    instead: str


_SAVES = "saves checkpoints of Lightning's Trainer, which hold another state than a run of Heliograph has"
_TUNES = "runs the loop of Lightning's Trainer by itself, before the training"
_THAWS = "adds parameter groups to the optimizer in mid-training, before a checkpoint's optimizer is loaded there"
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
    "BaseFinetuning": Refusal(_THAWS, "give fit an optimizer with all groups, and set requires_grad at EpochStart"),
    "BackboneFinetuning": Refusal(_THAWS, "give fit an optimizer with all groups, and set requires_grad at EpochStart"),
    "ModelPruning": Refusal(
        "renames the parameters that it prunes, so that a new model could not load a checkpoint",
        "torch.nn.utils.prune before fit, or after it",
    ),
}


def check_served(callback: Any) -> None:
    """Raise ValueError where a callback, or a class that it inherits from, cannot run here."""
    for kind in type(callback).__mro__:
        refusal = REFUSED.get(kind.__name__)
        if refusal is not None and kind.__module__.startswith(("lightning.", "pytorch_lightning.")):
            name = type(callback).__name__
            own = name if kind.__name__ == name else f"{name}, {with_article(kind.__name__)},"
            raise ValueError(f"{own} cannot run here: it {refusal.why}. Use {refusal.instead}.")


def is_shipped(callback: Any, flavour: Flavour, name: str) -> bool:
    """Return whether a callback is one of Lightning's own by that name, or inherits from it."""
    return isinstance(callback, flavour.part("callbacks", name))


def check_averaging(callback: Any, flavour: Flavour, run: Run) -> None:
    """At the start of a training: raise ValueError where the averaging of weights would need more than it gets here."""
    swa = is_shipped(callback, flavour, "StochasticWeightAveraging")
    if not (swa or is_shipped(callback, flavour, "WeightAveraging")) or run.report.is_replay:
        return
    from torch.distributed.tensor import DTensor
    from torch.nn.modules.batchnorm import _BatchNorm

    modules = [each for module in run.modules.values() for each in module.modules()]
    name, why = type(callback).__name__, ""
    if any(isinstance(parameter, DTensor) for module in modules for parameter in module.parameters(recurse=False)):
        why = "copies the model, whose weights are sharded here"
    elif swa and any(isinstance(module, _BatchNorm) for module in modules):
        why = "needs one more epoch without steps for batch norm, which this loop does not have"
    elif swa and run.schedulers:
        why = "takes the place of the scheduler, which fit was given: give fit none"
    if why:
        raise ValueError(f"{name} {why}. Use heliograph.EMA().")
