"""The view of a run that is shared by its Lightning callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from heliograph import Run

from .facade import TrainerFacade
from .flavour import Flavour, logger_class, view_class
from .names import MetricNames

_FUNCTIONS = {"train": "fit", "validation": "validate", "test": "test", "predict": "predict"}
_WORKS: WeakKeyDictionary[Run, dict[Flavour, RunView]] = WeakKeyDictionary()
_NO_EFFECT = (
    "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "sync_dist", "sync_dist_group", "add_dataloader_idx",
    "metric_attribute", "rank_zero_only",
)  # fmt: skip


class RunView:
    """A run for the callbacks of one package.

    Attributes:
        between_epochs: whether an epoch has ended and its boundary has not.
        in_epoch_end: whether `on_train_epoch_end` is running.
        batch_index: the index of the current batch, within its set in an evaluation.
        schedulers: Lightning's records of schedulers.
        users: the attached callbacks.
        trainer: their `trainer`.
        module: their `pl_module`.
        loggers: a list of the one logger.
    """

    def __init__(self, run: Run, flavour: Flavour) -> None:
        self.run, self.flavour = run, flavour
        self.between_epochs = self.in_epoch_end = False
        self.batch_index = 0
        self.metrics = MetricNames(run)
        self.users: list[Any] = []
        self.trainer = TrainerFacade(self)
        self.loggers = [logger_class(flavour)(self)]
        self.schedulers = list(_scheduler_records(self))
        self._set: tuple[str | None, int] = None, 0
        self._sets: list[str] = []  # in the order in which they are evaluated
        self.module = self._attach_module()
        self._rank_before = self._set_rank(run.engine.rank)

    @classmethod
    def of(cls, run: Run, flavour: Flavour) -> RunView:
        works = _WORKS.setdefault(run, {})
        if flavour not in works:
            works[flavour] = cls(run, flavour)
        return works[flavour]

    @property
    def epoch(self) -> int:
        return self.run.progress.epoch - self.between_epochs

    @property
    def trains(self) -> bool:
        return self.run.optimizer is not None

    @property
    def function(self) -> Any:
        return self.flavour.part("trainer.states", "TrainerFn")("fit" if self.trains else _FUNCTIONS[self.run.phase])

    @property
    def phase(self) -> str:
        return "train" if self.in_epoch_end else self.run.phase

    @property
    def state(self) -> Any:
        stage = self.phase if self.phase in ("train", "test", "predict") else "validate"
        names = ("TrainerState", "TrainerStatus", "RunningStage")
        state, status, stages = (self.flavour.part("trainer.states", name) for name in names)
        return state(status=status.RUNNING, fn=self.function, stage=stages(stage))

    def plugins(self) -> Iterator[Any]:
        yield from (self.run.plugins[name] for name in self.run.plugins.names())

    def callbacks(self) -> list[Any]:
        return list(self.users)

    def attach(self, callback: Any) -> None:
        callback.log, callback.log_dict = partial(_log, ref(self)), partial(_log_dict, ref(self))
        self.users.append(callback)

    def detach(self, callback: Any) -> None:
        for name in ("log", "log_dict"):
            vars(callback).pop(name, None)
        self.users.remove(callback)
        if not self.users:
            _WORKS.pop(self.run, None)
            self._set_rank(self._rank_before)
            self.module.trainer = None
            del self.module.log

    def log(self, name: str, value: Any, *, batch_size: int | None = None, reduce_fx: Any = "mean", **kw: Any) -> None:
        """Log a value with `run.track`, for `self.log` of callbacks.

        Args:
            name: the metric, as Lightning spells it.
            value: a number or a tensor with one element.
            batch_size: the number of samples that the value is a mean of.
            reduce_fx: only `mean` is supported.
            **kw: other options of Lightning, which have no effect.
        """
        if unknown := kw.keys() - set(_NO_EFFECT):
            raise TypeError(f"log({name!r}) does not take {', '.join(sorted(unknown))}.")
        if reduce_fx != "mean" and getattr(reduce_fx, "__name__", "") != "mean":
            raise ValueError(
                f"log({name!r}, reduce_fx={reduce_fx!r}): only 'mean' is supported. Reduce the values yourself and "
                f"log the result at the end of an epoch."
            )
        self.metrics.log(name, value, self.phase, 1.0 if batch_size is None else batch_size)

    def place(self, dataset: str, done: int) -> tuple[int, ...]:
        if dataset != self._set[0] or done == 0:
            self._set = dataset, done
        self.batch_index = done - self._set[1]
        if dataset not in self._sets:
            self._sets.append(dataset)
        return (self.batch_index, self._sets.index(dataset)) if dataset else (self.batch_index,)

    def _attach_module(self) -> Any:
        modules = [module for module in self.run.modules.values() if isinstance(module, self.flavour.module)]
        module = modules[0] if modules else view_class(self.flavour)(self.run.modules)
        module.trainer = self.trainer
        module.log = partial(_log, ref(self))
        return module

    def _set_rank(self, rank: int) -> int:
        decides = self.flavour.part("utilities.rank_zero", "rank_zero_only")
        before: int = decides.rank
        decides.rank = rank
        return before


def _log(work: ref[RunView], name: str, value: Any, **options: Any) -> None:
    """Log a value through a weak reference, because copies of a module or callback must not keep the run alive."""
    if (living := work()) is not None:
        living.log(name, value, **options)


def _log_dict(work: ref[RunView], dictionary: Mapping[str, Any], **options: Any) -> None:
    for name, value in dictionary.items():
        _log(work, name, value, **options)


def _scheduler_records(work: RunView) -> Iterator[Any]:
    from heliograph import LearningRate

    schedules = [plugin for plugin in work.plugins() if isinstance(plugin, LearningRate)]
    for name, scheduler in work.run.schedulers.items():
        interval = "step" if schedules and schedules[0].per_of(name) == "step" else "epoch"
        yield work.flavour.part("utilities.types", "LRSchedulerConfig")(scheduler, interval=interval)
