"""The run context: the facts of a run for its handlers, and what the loop needs of it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property, partial
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ..events import Bus, Control, Event, OrderedSignal, Progress
from ..events import catalogue as ev
from ..events.bus import is_within
from ..events.catalogue import Phase
from ..events.checks import count, place_of
from ..plugins import Plugins
from ..plugins.hints import OF_RUN, explains_attributes
from .data.sizes import SampleCounter, size_counter
from .data.training_data import TrainingData
from .engines.options import warning_of_frozen
from .lifetimes import Checkpoints, EpochWork, Hooks, Report, check_within
from .metrics import Metrics
from .result import RunResult, check_line
from .settings import Settings
from .stepping.windows import Windows, switched

if TYPE_CHECKING:
    from .engines.contract import LoopEngine
    from .engines.weights import OptimizerModes
    from .length import Length
    from .metrics.means import Means

logger = logging.getLogger("heliograph")


@explains_attributes(OF_RUN)
class RunVerbs(ABC):
    """The methods that a run has in common with a replayed one; the protocol `heliograph.Run` documents them."""

    control: Control
    progress: Progress
    checkpoints: Any
    report: Any

    @abstractmethod
    def is_last_batch(self) -> bool: ...

    @property
    def epoch_is_over(self) -> bool:
        """True if a resumed run is after an epoch's last batch, so that only the end of the epoch remains."""
        control = self.control
        ended = self.is_last_batch() or control.should_end_epoch
        return ended and self.progress.batch > 0 and not control.keeps_epoch_open

    def roll_back(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        if not self.report.started or self.report.finished or is_within(ev.TrainStart.name):
            raise RuntimeError("run.roll_back needs a started training. At TrainStart, call run.resume(saved).")
        self.control.roll_back(f"to {path or 'a saved state'}")
        self.checkpoints.pending_state = saved, path

    def note(self, text: str) -> None:
        self.report.notes.append(check_line("note", text))

    def warn(self, text: str) -> None:
        if check_line("warn", text) not in self.report.warnings:
            self.report.warnings.append(text)

    def log_image(self: Any, name: str, image: Any) -> None:
        _payloads().log_image(self, name, image)

    def log_figure(self: Any, name: str, figure: Any) -> None:
        _payloads().log_figure(self, name, figure)

    def log_text(self: Any, name: str, text: str) -> None:
        _payloads().log_text(self, name, text)

    def log_histogram(self: Any, name: str, values: Any) -> None:
        _payloads().log_histogram(self, name, values)

    def log_curve(self: Any, name: str, labels: Any, scores: Any) -> None:
        _payloads().log_curve(self, name, labels, scores)

    def log_file(self: Any, name: str, path: str | Path) -> None:
        _payloads().log_file(self, name, path)


def _payloads() -> Any:
    from .metrics import payloads

    return payloads


class HotSignals:
    """The signals of every batch, cached as attributes for the loop."""

    def __init__(self, bus: Bus) -> None:
        self.batch_start: OrderedSignal[ev.BatchStart] = bus.signal(ev.BatchStart)
        self.forward_end: OrderedSignal[ev.ForwardEnd] = bus.signal(ev.ForwardEnd)
        self.backward_end: OrderedSignal[ev.BackwardEnd] = bus.signal(ev.BackwardEnd)
        self.gradients_ready: OrderedSignal[ev.GradientsReady] = bus.signal(ev.GradientsReady)
        self.step_end: OrderedSignal[ev.StepEnd] = bus.signal(ev.StepEnd)
        self.batch_end: OrderedSignal[ev.BatchEnd] = bus.signal(ev.BatchEnd)
        self.should_stop: OrderedSignal[ev.ShouldStop] = bus.signal(ev.ShouldStop)
        self.log: OrderedSignal[ev.Log] = bus.signal(ev.Log)


class RunContext(RunVerbs):
    """The facts of one run; the protocol `heliograph.Run` documents those for plugins.

    Attributes:
        settings: the checked arguments of the run.
        hot: the signals of every batch.
        data: the training data.
        stepping: the optimizers, each with its micro-batches since the last step.
        modes: switches optimizers that have `train()` and `eval()`; None without such optimizers.
        work: the work of the epoch.
        checkpoints: the checkpoints, and the state that the run resumes from.
        report: the basis of its result.
        hooks: the functions that plugins registered.
    """

    # Read several times in every step: a slot takes a third of the time of an entry of `__dict__`.
    __slots__ = ("bus", "control", "hot", "loss", "origin", "outputs", "progress", "size_of", "stepping", "work")

    report: Report

    def __init__(
        self, settings: Settings, bus: Bus, plugins: Plugins, engine: LoopEngine, phase: Phase = "train"
    ) -> None:
        self.settings, self.bus, self.plugins, self.engine = settings, bus, plugins, engine
        self.name, self.phase = settings.name, phase
        self.size_of = size_counter(settings.task, SampleCounter(self.warn, settings.streams).count)
        self.hot = HotSignals(bus)
        self.checkpoints, self.report, self.hooks = Checkpoints(), Report(self), Hooks()
        self._begin_work()
        self.progress = Progress()
        self.origin = self.progress.copy()
        self.metrics: dict[str, float] = Metrics()
        self.data = TrainingData(settings.train, engine, self.note, per_sample=settings.per_sample, run=self)
        self.hooks.closing.callback(self.data.close)
        if settings.schedulers or isinstance(settings.epochs, float):
            self.settings = settings = self.length.complete(settings)
        self.stepping = _windows(settings, self)
        self.hooks.closing.callback(self.stepping.close)
        self.modes: OptimizerModes | None = None
        if optimizers := switched(settings.optimizers.values()):
            from .engines.weights import OptimizerModes

            self.modes = OptimizerModes(optimizers)
        self.control = _control(self)

    # Facts.

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {place_of(self).removeprefix('in ')}>"

    @property
    def task(self) -> Any:
        return self.settings.task

    @property
    def modules(self) -> Mapping[str, Any]:
        return self.settings.modules

    @property
    def hyper_parameters(self) -> Mapping[str, Any]:
        return self.settings.hyper_parameters

    @property
    def optimizers(self) -> Mapping[str, Any]:
        return self.settings.optimizers

    @property
    def schedulers(self) -> Mapping[str, Any]:
        return self.settings.schedulers

    @property
    def optimizer(self) -> Any:
        return self.stepping.current.optimizer

    @property
    def scheduler(self) -> Any:
        return self.stepping.current.scheduler

    @property
    def batch(self) -> Any:
        return self.work.batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        self.work.batch = batch

    @property
    def result(self) -> RunResult:
        return self.report.result

    @property
    def last_step(self) -> float:
        return inf if self.settings.steps is None else self.settings.steps

    @property
    def last_batch(self) -> float:
        # Finite only if the run ends within an epoch, after a fraction of its batches.
        return self.length.last_batch if isinstance(self.settings.epochs, float) else inf

    @property
    def is_complete(self) -> bool:
        return self.progress.steps >= self.last_step or self.has_epochs

    @property
    def has_epochs(self) -> bool:
        return self.progress.epoch >= (self.settings.epochs or inf) or self.progress.batch >= self.last_batch

    @cached_property
    def length(self) -> Length:
        from .length import Length

        return Length(self.settings, self.data, self.plugins, self.progress)

    def is_last_batch(self) -> bool:
        seen, length = self.work.is_last_seen, self.data.length
        if length is None:
            return bool(seen)
        return self.progress.batch + self.work.in_hand >= length and seen is not False

    # Metrics.

    @cached_property
    def means(self) -> Means:
        if self.control.is_shared:
            from .distributed.means import SharedMeans

            return SharedMeans(self.engine, cache(self.note))
        from .metrics import means

        return means.Means(cache(self.note))

    def track(self, name: str, value: Any, weight: float = 1.0) -> None:
        if not isinstance(name, str) or "/" in name:
            from .metrics.means import own_name

            name = own_name(name, self.phase)
        self.claim(name, "tracked")
        if self.report.tracks:
            self.means.add(name, value, weight)

    def claim(self, name: str, source: Literal["tracked", "returned"]) -> None:
        if self.work.claims.setdefault(name, source) != source:
            from .metrics.means import reserved

            raise reserved(name, self.phase)

    def collect(self, name: str, value: Any) -> None:
        collection = self.work.collection
        if collection is None or not self.control.is_evaluating:
            raise RuntimeError("run.collect needs a validation, test or prediction; in a training, use run.track.")
        collection.add(name, value, self.size_of(self.batch))

    @property
    def collected(self) -> Mapping[str, Any]:
        from .outputs import Collected

        return Collected() if self.work.collection is None else self.work.collection.whole

    # State.

    @abstractmethod
    def state_dict(self, shards: Mapping[str, Any] | None = None, *, weights_only: bool = False) -> dict[str, Any]: ...

    def loop_state(self) -> dict[str, Any]:
        from .loop_state import capture_loop

        return capture_loop(self)

    def load_loop_state(self, saved: Mapping[str, Any], note: str) -> None:
        from .loop_state import load_loop

        load_loop(self, saved, note)

    def resume(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        check_within(ev.TrainStart, "resume")
        self.checkpoints.pending_state, self.checkpoints.is_resume = (saved, path), True

    def blame(self, error: BaseException) -> tuple[str | None, str | None]:
        blamed = self.bus.blamed
        return blamed[1:] if blamed is not None and blamed[0] is error else (None, None)

    def when_closed(self, action: Callable[[], object]) -> None:
        self.hooks.closing.callback(action)

    # For the loop.

    def feed(self, report_replay: Callable[[int, int], None]) -> Iterator[Any]:
        self.stepping.bind(self.engine)
        is_shared, batch, length = self.control.is_shared, self.progress.batch, self.data.length
        last = self.last_batch
        is_over = is_shared and batch > 0 and self.is_last_batch()
        peeks = not isinstance(self.data.train_loader, Iterator)  # a plain iterator would lose an item
        ahead = self.work.reads_ahead and peeks
        report = partial(self._report_replay, report_replay)
        saves = self.plugins.writes_saves() or not self.work.reads_ahead  # the user's own loop may call state_dict
        batches = self.data.open(self.progress, report, is_over=is_over, ahead=ahead, saves=saves)
        self.hooks.call_positioned()
        mark = partial(setattr, self.work, "is_last_seen")
        if is_shared:
            from .distributed.shared_control import read_together

            if length is not None:
                remaining: int | None = int(min(length, last)) - batch
            else:
                remaining = 0 if self.work.is_last_seen else None
            marks = mark if peeks and (ahead or length is not None) and not is_over and last == inf else None
            batches = read_together(batches, self.data, self.engine, remaining, self.size_of, marks)
        elif last < inf:
            batches = islice(batches, max(0, int(last) - batch))
        elif (length is None and ahead) or (length is not None and type(self.data.train_loader) not in (list, tuple)):
            from .data.last_batch import mark_last

            sure = max(0, (length or 0) - batch - peeks)  # the loader may have more batches than its length
            batches = chain(islice(batches, sure), mark_last(batches, mark, ahead=peeks))
        fed, source = self.engine.feed(batches), self.data.source
        if source is None or not source.parts:
            return fed
        from .data.streams import counted

        return counted(source, fed, self.progress, partial(setattr, self.data, "stream"))

    def _report_replay(self, report_replay: Callable[[int, int], None], done: int, batches: int) -> None:
        number = count(batches, "batch", "batches")
        replay = f"{number} of epoch {self.progress.epoch} again to reach the position of the checkpoint"
        if done == 0 and not self.bus.signal(ev.Replay).chain:
            logger.warning("run %r reads %s", self.name, replay)
        report_replay(done, batches)
        if done == batches:
            self.note(f"read {replay}")

    @abstractmethod
    def describe(self) -> str: ...

    def log_plan(self) -> None:
        if self.engine.is_main and logger.isEnabledFor(logging.INFO):
            logger.info("%s", self.report.plan())
        if self.engine.is_main and self.modules and logger.isEnabledFor(logging.DEBUG):
            from .summary import summary

            logger.debug("%s", summary(self.task))

    def prepare_comparison(self) -> None:
        """If something is saved or resumed, capture the initial state that no state_dict covers."""
        if self.checkpoints.is_resuming or self.bus.signal(ev.SavePoint).chain:
            from .checkpoint.schema import base_rates
            from .objects.run_state import ObjectState

            with self.evaluating_weights():
                self.checkpoints.objects = ObjectState.of(self)
            self.checkpoints.given_rates = base_rates(self.optimizers)

    def evaluating_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights for evaluation and saving."""
        return nullcontext() if self.modes is None else self.modes.evaluating()

    def comparing_start(self) -> AbstractContextManager[None]:
        """Return a context for `EpochStart` that compares the effects of its handlers in a resumed epoch."""
        objects = self.checkpoints.resumed_objects
        return nullcontext() if objects is None else objects.comparing_start(self)

    def compare_end(self) -> None:
        """Compare the data of a resumed run if no epoch followed."""
        if self.checkpoints.resumed_objects is not None:
            self.checkpoints.resumed_objects.compare_end(self)
            self.hooks.call_positioned()

    def advance(self) -> None:
        self.control.close_epoch()
        self._begin_work()
        self.data.stream = None
        self.progress.end_epoch()
        self.data.advance()

    def _begin_work(self) -> None:
        self.work = EpochWork()
        self.loss: Tensor | None = None  # loss and outputs are set in every step: no properties, for speed
        self.outputs: Any = None

    def discard_epoch(self) -> None:
        self.hooks.settle()  # so that none of its events is emitted later
        self.control.discard_epoch()
        self._begin_work()
        self.data.stream = None
        self.metrics.clear()
        self.stepping.clear()
        for optimizer in self.optimizers.values():
            self.engine.bind_zero_grad(optimizer)()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Return a context for the handlers of `TrainStart`, within which a plugin can isolate observers.

        Raises:
            StrictError: the handlers have warned, and the trainer is strict.
            ValueError: a handler has put modules into the task that would not be trained.
        """
        if not self.bus.receiver_count:
            yield
        else:
            from .shortfall import InitialModules  # imported when there are handlers

            modules = InitialModules(self.task)
            with self.isolating():
                yield
            modules.check(self.optimizers.values(), self.engine.world_size)
        if text := warning_of_frozen(self.modules):
            self.warn(text)
        self.report.raise_if_strict()

    def isolating(self) -> AbstractContextManager[None]:
        """Run handlers of observers in the context that a plugin may set at `TrainStart`."""
        from ..plugins.states import isolating

        return isolating(self)

    def emit(self, event: Event) -> None:
        """Emit an event; an out-of-band event has its own deferred callbacks, which run right after it."""
        self.report.emitted.add(type(event))
        if not event.apart:
            self.bus.signal(type(event)).emit(self, event)
            return
        hooks = self.hooks
        deferred, hooks.positioned = hooks.positioned, []
        try:
            self.bus.signal(type(event)).emit(self, event)
            hooks.call_positioned()
        finally:
            hooks.positioned = deferred


def _windows(settings: Settings, run: RunContext) -> Windows:
    if settings.several:
        from .stepping.named_windows import NamedWindows

        windows: Windows = NamedWindows(settings.optimizers, settings.schedulers)
    else:
        windows = Windows(settings.optimizers, settings.schedulers)
    if settings.allow_unused_parameters:
        for window in windows.by_name.values():
            window.without_gradient = []
    windows.weigh = partial(_weigh, run)
    return windows


def _weigh(run: RunContext, count: Any) -> None:
    from .stepping.counts import weigh

    weigh(run, count)


def _control(run: RunContext) -> Control:
    if run.engine.world_size == 1:
        control = Control(run.progress)
    else:
        from .distributed.shared_control import SharedControl

        control = SharedControl(run)
    control.max_skips = run.settings.max_skipped_steps
    return control
