"""What callbacks get as `trainer`: built from the run, and read from it whenever they ask."""

from __future__ import annotations

import math
from typing import Any

from .parts import FitLoop, LoggerConnector, Part, Strategy

UNEXPLAINED = "the callback has set trainer.should_stop"
_PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class TrainerFacade(Part):
    """A trainer of Lightning as far as callbacks use one; what it does not have is an AttributeError that says so."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set `should_stop`: a request in the name of the callback, or taken back.

        Raises:
            AttributeError: it is another attribute.
        """
        if name != "should_stop":
            super().__setattr__(name, value)
        control = self._work.run.control
        if value and not control.should_stop:
            control.stop(UNEXPLAINED)
        elif control.should_stop and not value:
            control.withdraw("stop", "the callback has set trainer.should_stop = False")


def _max_epochs(work: Any) -> int:
    return -1 if work.run.length.max_epochs is None else math.ceil(work.run.length.max_epochs)


def _training_batches(work: Any) -> float:
    length = work.run.length.batches_per_epoch
    return math.inf if length is None else length


def _validation_batches(work: Any) -> list[float]:
    loaders = work.run.data.validation_loaders.values()
    return [len(each) if hasattr(each, "__len__") else math.inf for each in loaders]


def _validation_loaders(work: Any) -> Any:
    loaders = work.run.data.validation_loaders
    return loaders[""] if list(loaders) == [""] else list(loaders.values()) or None


def _window(work: Any) -> int:
    from heliograph import GradientAccumulation

    found = [each for each in work.plugins() if isinstance(each, GradientAccumulation)]
    return found[0].number(work.epoch) if found else 1


def _accelerator(work: Any) -> Any:
    kind = work.run.engine.device.type
    names = {"cpu": "CPUAccelerator", "cuda": "CUDAAccelerator", "mps": "MPSAccelerator"}
    return work.flavour.part("accelerators", names[kind])()


def _precision(work: Any) -> str:
    return _PRECISIONS[getattr(getattr(work.run.engine, "precision", None), "name", "fp32")]


def _planned_steps(work: Any) -> float:
    return math.inf if work.run.length.planned_steps is None else work.run.length.planned_steps


TrainerFacade.readers = {
    # Where the run is.
    "global_step": lambda work: work.run.progress.steps,
    "current_epoch": lambda work: work.epoch,
    "is_last_batch": lambda work: work.run.data.is_last_batch,
    "max_epochs": _max_epochs,
    "max_steps": lambda work: -1 if work.run.length.max_steps is None else work.run.length.max_steps,
    "num_training_batches": _training_batches,
    "num_val_batches": _validation_batches,
    "estimated_stepping_batches": _planned_steps,
    "accumulate_grad_batches": _window,
    # What it does.
    "state": lambda work: work.state,
    "training": lambda work: work.phase == "train",
    "validating": lambda work: work.phase == "validation",
    "testing": lambda work: work.phase == "test",
    "predicting": lambda work: work.phase == "predict",
    "evaluating": lambda work: work.phase in ("validation", "test"),
    "sanity_checking": lambda _: False,
    "fast_dev_run": lambda _: False,
    "barebones": lambda _: False,
    "enable_validation": lambda work: bool(work.run.data.validation_sets),
    # EarlyStopping and others look once per epoch where both are 1, else after each validation.
    "val_check_interval": lambda work: None if work.run.data.validation_sets else 1.0,
    "check_val_every_n_epoch": lambda work: None if work.run.data.validation_sets else 1,
    "should_stop": lambda work: work.run.control.should_stop,
    "ckpt_path": lambda work: work.run.checkpoints.resumed_from,
    # What it measures.
    "callback_metrics": lambda work: work.metrics,
    "logged_metrics": lambda work: work.metrics,
    "progress_bar_metrics": lambda work: {name: float(value) for name, value in work.metrics.items()},
    "logger": lambda work: work.loggers[0],
    "loggers": lambda work: work.loggers,
    "_logger_connector": LoggerConnector,
    # What it holds.
    "model": lambda work: work.module,
    "lightning_module": lambda work: work.module,
    "optimizers": lambda work: list(work.run.optimizers.values()),
    "lr_scheduler_configs": lambda work: work.schedulers,
    "train_dataloader": lambda work: work.run.data.train_loader,
    "val_dataloaders": _validation_loaders,
    "callbacks": lambda work: work.callbacks(),
    "fit_loop": FitLoop,
    # Where it computes.
    "is_global_zero": lambda work: work.run.engine.is_main,
    "global_rank": lambda work: work.run.engine.rank,
    "local_rank": lambda work: work.run.engine.local_rank,
    "world_size": lambda work: work.run.engine.world_size,
    "strategy": Strategy,
    "accelerator": _accelerator,
    "precision": _precision,
}
