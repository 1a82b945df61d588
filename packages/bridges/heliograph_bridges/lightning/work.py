"""What the callbacks of one run share: the trainer and the module that they get, and where the run is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from heliograph import NotRecorded, Run

from .facade import TrainerFacade
from .flavour import Flavour, logger_class, view_class
from .names import MetricNames

_FUNCTIONS = {"train": "fit", "validation": "validate", "test": "test", "predict": "predict"}
_WORKS: WeakKeyDictionary[Run, dict[Flavour, Work]] = WeakKeyDictionary()
_NO_EFFECT = (
    "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "sync_dist", "sync_dist_group", "add_dataloader_idx",
    "metric_attribute", "rank_zero_only",
)  # fmt: skip


class Unrecorded:
    """What callbacks get as `pl_module` in a replay, which has no model."""

    def __getattr__(self, name: str) -> Any:
        raise NotRecorded("the modules")


class Work:
    """One run, as the callbacks of one package see it.

    Args:
        run: the run.
        flavour: the package.

    Attributes:
        between_epochs: whether an epoch has ended and its boundary has not.
        in_epoch_end: whether `on_train_epoch_end` is being called, perhaps at the end of a validation.
        batch_index: the index of the batch in hand, of its set where it is evaluated.
        schedulers: Lightning's records of schedulers; those that callbacks add are stepped when an epoch ends.
        users: the callbacks that were set up.
        trainer: what they get as `trainer`.
        module: what they get as `pl_module`.
        loggers: the one logger.
    """

    def __init__(self, run: Run, flavour: Flavour) -> None:
        self.run, self.flavour = run, flavour
        self.between_epochs = self.in_epoch_end = False
        self.batch_index = 0
        self.metrics = MetricNames(run)
        self.users: list[Any] = []
        self.trainer = TrainerFacade(self)
        self.loggers = [logger_class(flavour)(self)]
        self.schedulers: list[Any] = [] if run.report.is_replay else list(_scheduler_records(self))
        self._given = tuple(self.schedulers)
        self._set: tuple[str | None, int] = None, 0
        self._sets: list[str] = []  # in the order in which they are evaluated
        self.module: Any = Unrecorded() if run.report.is_replay else self._attach_module()
        self._rank_before = self._set_rank(run.engine.rank)

    @classmethod
    def of(cls, run: Run, flavour: Flavour) -> Work:
        """Return the work of a run, the same for all callbacks of a package."""
        works = _WORKS.setdefault(run, {})
        if flavour not in works:
            works[flavour] = cls(run, flavour)
        return works[flavour]

    @property
    def epoch(self) -> int:
        """The index of the epoch; until the boundary after it, that of the one that has ended."""
        return self.run.progress.epoch - self.between_epochs

    @property
    def trains(self) -> bool:
        """Whether the run is a training."""
        return self.run.optimizer is not None

    @property
    def function(self) -> Any:
        """What the user has called, as one of Lightning's `TrainerFn`, which are strings."""
        return self.flavour.part("trainer.states", "TrainerFn")("fit" if self.trains else _FUNCTIONS[self.run.phase])

    @property
    def phase(self) -> str:
        """What runs, as callbacks see it: the end of an epoch belongs to the training."""
        return "train" if self.in_epoch_end else self.run.phase

    @property
    def state(self) -> Any:
        """Lightning's record of what runs."""
        stage = self.phase if self.phase in ("train", "test", "predict") else "validate"
        names = ("TrainerState", "TrainerStatus", "RunningStage")
        state, status, stages = (self.flavour.part("trainer.states", name) for name in names)
        return state(status=status.RUNNING, fn=self.function, stage=stages(stage))

    def plugins(self) -> Iterator[Any]:
        """Yield the plugins of the run."""
        yield from (self.run.plugins[name] for name in self.run.plugins.names())

    def callbacks(self) -> list[Any]:
        """Return the callbacks that were set up so far."""
        return list(self.users)

    def attach(self, callback: Any) -> None:
        """Give a callback its `log` and `log_dict`."""
        callback.log, callback.log_dict = partial(_log, ref(self)), partial(_log_dict, ref(self))
        self.users.append(callback)

    def detach(self, callback: Any) -> None:
        """Take them back; with the last callback the module is left as it was."""
        for name in ("log", "log_dict"):
            vars(callback).pop(name, None)
        self.users.remove(callback)
        if not self.users:
            _WORKS.pop(self.run, None)
            self._set_rank(self._rank_before)
            if not self.run.report.is_replay:
                self.module.trainer = None
                del self.module.log

    def log(self, name: str, value: Any, *, batch_size: int | None = None, reduce_fx: Any = "mean", **kw: Any) -> None:
        """Log a value as `run.track` does: when it is logged, and where it is shown, is decided by plugins.

        Args:
            name: of the metric, as Lightning spells it.
            value: a number or a tensor of one.
            batch_size: how many samples it is a mean of.
            reduce_fx: only means are taken.
            **kw: what else Lightning takes, which has no effect here.

        Raises:
            TypeError: there is no such argument.
            ValueError: another reduction than the mean.
        """
        if unknown := kw.keys() - set(_NO_EFFECT):
            raise TypeError(f"log({name!r}) does not take {', '.join(sorted(unknown))}.")
        if reduce_fx != "mean" and getattr(reduce_fx, "__name__", "") != "mean":
            raise ValueError(
                f"log({name!r}, reduce_fx={reduce_fx!r}): values are averaged here, so only 'mean' is allowed. Log "
                f"what you have reduced yourself at the end of an epoch."
            )
        self.metrics.log(name, value, self.phase, 1.0 if batch_size is None else batch_size)

    def place(self, dataset: str, done: int) -> tuple[int, ...]:
        """Return the index of an evaluated batch in its set; of several sets also the index of the set.

        Args:
            dataset: the name of the set.
            done: how many batches of the evaluation were done before it.
        """
        if dataset != self._set[0] or done == 0:
            self._set = dataset, done
        self.batch_index = done - self._set[1]
        if dataset not in self._sets:
            self._sets.append(dataset)
        return (self.batch_index, self._sets.index(dataset)) if dataset else (self.batch_index,)

    def end_epoch(self) -> None:
        """An epoch has ended: step the schedulers that callbacks have added, once."""
        if self.between_epochs:
            return
        self.between_epochs = True
        with warnings.catch_warnings():
            if self.run.origin.steps:  # the optimizer's steps were taken before the resume: torch cannot know
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for record in self.schedulers:
                if record not in self._given and record.interval == "epoch":
                    record.scheduler.step()

    def _attach_module(self) -> Any:
        """Return the LightningModule of the task, or a view on its modules, with this trainer and its `log`."""
        own = [each for each in self.run.modules.values() if isinstance(each, self.flavour.module)]
        module = own[0] if own else view_class(self.flavour)(self.run.modules)
        module.trainer = self.trainer
        module.log = partial(_log, ref(self))
        return module

    def _set_rank(self, rank: int) -> int:
        """Set the rank by which `rank_zero_only` of Lightning decides, and return what it was."""
        decides = self.flavour.part("utilities.rank_zero", "rank_zero_only")
        before: int = decides.rank
        decides.rank = rank
        return before


def _log(work: ref[Work], name: str, value: Any, **options: Any) -> None:
    """Log a value; a function of a weak reference, as copies of a module or callback must not hold the run."""
    if (living := work()) is not None:
        living.log(name, value, **options)


def _log_dict(work: ref[Work], dictionary: Mapping[str, Any], **options: Any) -> None:
    for name, value in dictionary.items():
        _log(work, name, value, **options)


def _scheduler_records(work: Work) -> Iterator[Any]:
    from heliograph import LearningRate

    found = [each for each in work.plugins() if isinstance(each, LearningRate)]
    for name, scheduler in work.run.schedulers.items():
        interval = "step" if found and found[0].per_of(name) == "step" else "epoch"
        yield work.flavour.part("utilities.types", "LRSchedulerConfig")(scheduler, interval=interval)
