"""The `trainer` that callbacks receive: a read-only view of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar
from weakref import ref

from heliograph.spi import LoopEngine, known_names

UNEXPLAINED = "the callback has set trainer.should_stop"
_PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}

Readers = Mapping[str, Any]
REMEDY = "Write a plugin if you need more control: see docs/learn/first_plugin.md."


class Part:
    """A part of a Lightning trainer with mostly read-only attributes.

    Args:
        work: the `RunView` of the run, which is passed to the readers.

    Attributes:
        label: its name in error messages.
        readers: a function for each attribute that returns its value.
    """

    label = "trainer"
    readers: ClassVar[Readers] = {}

    def __init__(self, work: Any) -> None:
        vars(self)["_reference"] = ref(work)  # a module that keeps its trainer must not keep the run alive

    @property
    def _work(self) -> Any:
        return self._reference()

    def __getattr__(self, name: str) -> Any:
        if (reader := self.readers.get(name)) is None:
            raise AttributeError(
                f"from_lightning does not support {self.label}.{name} in a Heliograph training."
                f"{known_names(name, self.readers)} {REMEDY}"
            )
        return reader(self._work)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{self.label}.{name} = {value!r} would have no effect: plugins and the arguments of fit control a "
            f"Heliograph training. Callbacks can only set trainer.should_stop. {REMEDY}"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.readers})


SHARED: Readers = {  # by the trainer and its strategy
    "is_global_zero": lambda work: work.run.engine.is_main,
    "global_rank": lambda work: work.run.engine.rank,
    "local_rank": lambda work: work.run.engine.local_rank,
    "world_size": lambda work: work.run.engine.world_size,
    "model": lambda work: work.module,
    "lightning_module": lambda work: work.module,
}


class Strategy(Part):
    """The collectives of the engine."""

    label = "trainer.strategy"
    readers: ClassVar[Readers] = {"root_device": lambda work: work.run.engine.device, **SHARED}

    @property
    def _engine(self) -> LoopEngine:
        return self._work.run.engine  # type: ignore[no-any-return]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._engine.broadcast(obj, src)

    def barrier(self, name: str | None = None) -> None:
        self._engine.barrier()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if group is not None:
            raise NotImplementedError("trainer.strategy.reduce(group=...): ranks are reduced over all together.")
        how: Any = str(reduce_op).rpartition(".")[2].lower()
        return self._engine.reduce(tensor, "mean" if how == "avg" else how)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # Lightning's name
        if all:
            return not self._engine.vote([float(not decision)])[0]
        return bool(self._engine.vote([float(decision)])[0])


class EpochLoop(Part):
    label = "trainer.fit_loop.epoch_loop"
    readers: ClassVar[Readers] = {
        "_batches_that_stepped": lambda work: work.run.progress.steps,
        "global_step": lambda work: work.run.progress.steps,
        "batch_idx": lambda work: work.batch_index,
        "total_batch_idx": lambda work: work.run.progress.batches - 1,
    }


class FitLoop(Part):
    label = "trainer.fit_loop"
    readers: ClassVar[Readers] = {
        "epoch_loop": EpochLoop,
        "max_epochs": lambda work: work.trainer.max_epochs,
        "total_batch_idx": lambda work: work.run.progress.batches - 1,
    }


class LoggerConnector(Part):
    label = "trainer._logger_connector"
    readers: ClassVar[Readers] = {"should_update_logs": lambda work: work.run.report.tracks}


class TrainerFacade(Part):
    """The attributes of a Lightning trainer that callbacks use; others raise AttributeError."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "should_stop":
            super().__setattr__(name, value)
        control = self._work.run.control
        if value and not control.should_stop:
            control.stop(UNEXPLAINED)
        elif control.should_stop and not value:
            control.withdraw("stop", "the callback has set trainer.should_stop = False")


def _validation_batches(work: Any) -> list[float]:
    loaders = work.run.data.validation_loaders.values()
    return [len(loader) if hasattr(loader, "__len__") else math.inf for loader in loaders]


def _validation_loaders(work: Any) -> Any:
    loaders = work.run.data.validation_loaders
    return loaders[""] if list(loaders) == [""] else list(loaders.values()) or None


def _window(work: Any) -> int:
    from heliograph import GradientAccumulation

    plugins = [plugin for plugin in work.plugins() if isinstance(plugin, GradientAccumulation)]
    return plugins[0].number(work.epoch) if plugins else 1


def _accelerator(work: Any) -> Any:
    kind = work.run.engine.device.type
    names = {"cpu": "CPUAccelerator", "cuda": "CUDAAccelerator", "mps": "MPSAccelerator"}
    return work.flavour.part("accelerators", names[kind])()


TrainerFacade.readers = {
    # Where the run is.
    "global_step": lambda work: work.run.progress.steps,
    "current_epoch": lambda work: work.epoch,
    "is_last_batch": lambda work: work.run.data.is_last_batch,
    "max_epochs": lambda work: -1 if work.run.length.max_epochs is None else math.ceil(work.run.length.max_epochs),
    "max_steps": lambda work: -1 if work.run.length.max_steps is None else work.run.length.max_steps,
    "num_training_batches": lambda work: work.run.length.batches_per_epoch or math.inf,
    "num_val_batches": _validation_batches,
    "estimated_stepping_batches": lambda work: work.run.length.planned_steps or math.inf,
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
    # If both are 1, EarlyStopping and others check once per epoch, otherwise after each validation.
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
    "optimizers": lambda work: list(work.run.optimizers.values()),
    "lr_scheduler_configs": lambda work: work.schedulers,
    "train_dataloader": lambda work: work.run.data.train_loader,
    "val_dataloaders": _validation_loaders,
    "callbacks": lambda work: work.callbacks(),
    "fit_loop": FitLoop,
    # Where it computes.
    **SHARED,
    "strategy": Strategy,
    "accelerator": _accelerator,
    "precision": lambda work: _PRECISIONS[getattr(getattr(work.run.engine, "precision", None), "name", "fp32")],
}
