"""What handlers are given: the facts of a run, and what they may ask of it besides control."""

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
from ..events.errors import count, place_of
from ..plugins import Plugins
from ..plugins.hints import OF_RUN, explains_attributes
from .data.order.sizes import SampleCounter, size_counter
from .data.training_data import TrainingData
from .engines.options import warning_of_frozen
from .lifetimes import Checkpoints, EpochWork, Hooks, Report, check_within
from .metrics.values import Metrics
from .result import RunResult, check_line
from .settings import Settings
from .stepping.optimizers import switched
from .stepping.windows import Windows

if TYPE_CHECKING:
    from .engines.contract import LoopEngine
    from .engines.weights import OptimizerModes
    from .length import Length
    from .metrics.means import Means

logger = logging.getLogger("heliograph")


@explains_attributes(OF_RUN)
class LineVerbs:
    """The verbs of a run that add lines or payloads; the protocol `heliograph.Run` documents them."""

    report: Any

    def note(self, text: str) -> None:
        """Add a line that the result shows."""
        self.report.notes.append(check_line("note", text))

    def warn(self, text: str) -> None:
        """Add a sentence to the warnings of the result, unless it is there."""
        if check_line("warn", text) not in self.report.warnings:
            self.report.warnings.append(text)

    def log_image(self: Any, name: str, image: Any) -> None:
        """Show an image in every tracker."""
        _payloads().log_image(self, name, image)

    def log_figure(self: Any, name: str, figure: Any) -> None:
        """Show a figure in every tracker."""
        _payloads().log_figure(self, name, figure)

    def log_text(self: Any, name: str, text: str) -> None:
        """Show a text in every tracker."""
        _payloads().log_text(self, name, text)

    def log_histogram(self: Any, name: str, values: Any) -> None:
        """Show the distribution of values in every tracker."""
        _payloads().log_histogram(self, name, values)

    def log_curve(self: Any, name: str, labels: Any, scores: Any) -> None:
        """Show a precision-recall curve in every tracker."""
        _payloads().log_curve(self, name, labels, scores)

    def log_file(self: Any, name: str, path: str | Path) -> None:
        """Keep a file with the run in every tracker."""
        _payloads().log_file(self, name, path)


def _payloads() -> Any:
    from .metrics import payloads

    return payloads


class HotSignals:
    """The signals of every batch, held where the loop reaches them in one step."""

    def __init__(self, bus: Bus) -> None:
        self.batch_start: OrderedSignal[ev.BatchStart] = bus.signal(ev.BatchStart)
        self.forward_end: OrderedSignal[ev.ForwardEnd] = bus.signal(ev.ForwardEnd)
        self.backward_end: OrderedSignal[ev.BackwardEnd] = bus.signal(ev.BackwardEnd)
        self.gradients_ready: OrderedSignal[ev.GradientsReady] = bus.signal(ev.GradientsReady)
        self.step_end: OrderedSignal[ev.StepEnd] = bus.signal(ev.StepEnd)
        self.batch_end: OrderedSignal[ev.BatchEnd] = bus.signal(ev.BatchEnd)
        self.should_stop: OrderedSignal[ev.ShouldStop] = bus.signal(ev.ShouldStop)
        self.log: OrderedSignal[ev.Log] = bus.signal(ev.Log)


class RunContext(LineVerbs, ABC):
    """One run's facts; the protocol `heliograph.Run` documents those that handlers are given.

    Attributes:
        settings: what the run was called with.
        hot: the signals of every batch.
        data: the training data.
        stepping: the optimizers, each with the micro-batches since its last step.
        modes: switches optimizers with `train()` and `eval()`; None without any.
        work: the work of the epoch.
        checkpoints: its checkpoints, and what it continues from.
        report: what becomes its result.
        hooks: what plugins let it call.
    """

    # Read several times in every step: a slot is found in a third of the time that an entry of `__dict__` takes.
    __slots__ = ("bus", "control", "hot", "loss", "origin", "outputs", "progress", "size_of", "stepping", "work")

    report: Report

    def __init__(
        self, settings: Settings, bus: Bus, plugins: Plugins, engine: LoopEngine, phase: Phase = "train"
    ) -> None:
        self.settings, self.bus, self.plugins, self.engine = settings, bus, plugins, engine
        self.name, self.phase = settings.name, phase
        self.size_of = size_counter(settings.task, SampleCounter(self.warn, settings.streams))
        self.hot = HotSignals(bus)
        self.checkpoints, self.report, self.hooks = Checkpoints(), Report(self), Hooks()
        self._begin_work()
        self.progress = Progress()
        self.origin = self.progress.copy()
        self.metrics: dict[str, float] = Metrics()
        self.data = TrainingData(
            settings.train,
            engine,
            self.note,
            per_sample=settings.per_sample,
            run=self,
        )
        self.hooks.closing.callback(self.data.close)
        if settings.schedulers or isinstance(settings.epochs, float):
            self.settings = settings = self.length.complete(settings)
        self.stepping = _windows(settings, self)
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
        """The user's model code."""
        return self.settings.task

    @property
    def modules(self) -> Mapping[str, Any]:
        """The modules of the task by name."""
        return self.settings.modules

    @property
    def hyper_parameters(self) -> Mapping[str, Any]:
        """The user's description of the run."""
        return self.settings.hyper_parameters

    @property
    def optimizers(self) -> Mapping[str, Any]:
        """The optimizers by name."""
        return self.settings.optimizers

    @property
    def schedulers(self) -> Mapping[str, Any]:
        """The schedulers by the names of their optimizers."""
        return self.settings.schedulers

    @property
    def optimizer(self) -> Any:
        """The optimizer that is stepped, else the first."""
        return self.stepping.current.optimizer

    @property
    def scheduler(self) -> Any:
        """The scheduler of that optimizer, or None."""
        return self.stepping.current.scheduler

    @property
    def batch(self) -> Any:
        """The current batch."""
        return self.work.batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        self.work.batch = batch

    @property
    def result(self) -> RunResult:
        """How the run went, once it is closed."""
        return self.report.result

    @property
    def last_step(self) -> float:
        """The optimizer step that ends the run, infinite where none does."""
        return inf if self.settings.steps is None else self.settings.steps

    @property
    def last_batch(self) -> float:
        """After how many batches of the epoch the run ends, if that is with a fraction of it; else infinite."""
        return self.length.last_batch if isinstance(self.settings.epochs, float) else inf

    @property
    def is_complete(self) -> bool:
        """Whether the requested length is reached."""
        return self.progress.steps >= self.last_step or self.has_epochs

    @property
    def has_epochs(self) -> bool:
        """Whether the requested epochs are done, with the fraction of the last."""
        return self.progress.epoch >= (self.settings.epochs or inf) or self.progress.batch >= self.last_batch

    @cached_property
    def length(self) -> Length:
        """The length that is planned."""
        from .length import Length

        return Length(self.settings, self.data, self.plugins, self.progress)

    @property
    def epoch_is_over(self) -> bool:
        """Whether a resumed run is after an epoch's last batch: the end of the epoch is still to be emitted."""
        control = self.control
        ended = self.is_last_batch() or control.should_end_epoch
        return ended and self.progress.batch > 0 and not control.keeps_epoch_open

    def is_last_batch(self) -> bool:
        """Return whether the current batch is the last of its epoch."""
        seen, length = self.work.is_last_seen, self.data.length
        if length is None:
            return bool(seen)
        return self.progress.batch + self.work.in_hand >= length and seen is not False

    # Metrics.

    @cached_property
    def means(self) -> Means:
        """The running means of what is tracked: of this process, or of all ranks; made when first used."""
        if self.control.is_shared:
            from .distributed.ranks.means import SharedMeans

            return SharedMeans(self.engine, cache(self.note))
        from .metrics import means

        return means.Means(cache(self.note))

    def track(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Add a value to the running mean of `<phase>/<name>`."""
        if not isinstance(name, str) or "/" in name:
            from .metrics.means import own_name

            name = own_name(name, self.phase)
        self.claim(name, "tracked")
        if self.report.tracks:
            self.means.add(name, value, weight)

    def claim(self, name: str, source: Literal["tracked", "returned"]) -> None:
        """Raise ValueError if a tracked value and one that the task returns would share a mean."""
        if self.work.claims.setdefault(name, source) != source:
            from .metrics.means import reserved

            raise reserved(name, self.phase)

    def collect(self, name: str, value: Any) -> None:
        """Keep a value of the batch in hand until the evaluation ends."""
        from .outputs.collection import running

        running(self.work.collection, self.control).add(name, value, self.size_of(self.batch))

    @property
    def collected(self) -> Mapping[str, Any]:
        """What was collected in the evaluation that ends."""
        from .outputs.collection import whole_of

        return whole_of(self.work.collection)

    # State.

    @abstractmethod
    def state_dict(self, shards: Mapping[str, Any] | None = None, *, weights_only: bool = False) -> dict[str, Any]:
        """Return one consistent snapshot of everything that a resumed run needs."""

    def resume(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """Continue from a saved state, applied when every `TrainStart` handler has run."""
        check_within(ev.TrainStart, "resume")
        self.checkpoints.pending_state, self.checkpoints.is_resume = (saved, path), True

    def roll_back(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """Discard the epoch at the next boundary, and continue from a saved state."""
        if not self.report.started or self.report.finished or is_within(ev.TrainStart.name):
            raise RuntimeError("run.roll_back is for a training that has begun. At TrainStart, call run.resume(saved).")
        self.control.roll_back(f"to {path or 'a saved state'}")
        self.checkpoints.pending_state = saved, path

    def blame(self, error: BaseException) -> tuple[str | None, str | None]:
        """Return the plugin and the event whose handler raised an error, if one did."""
        blamed = self.bus.blamed
        return blamed[1:] if blamed is not None and blamed[0] is error else (None, None)

    def when_closed(self, action: Callable[[], object]) -> None:
        """Call `action` when the run is closed."""
        self.hooks.closing.callback(action)

    # The loop's side.

    def feed(self, report_replay: Callable[[int, int], None]) -> Iterator[Any]:
        """Return the rest of the epoch's batches, on the device."""
        self.stepping.bind(self.engine)
        is_shared, batch, length = self.control.is_shared, self.progress.batch, self.data.length
        last = self.last_batch
        is_over = is_shared and batch > 0 and self.is_last_batch()
        peeks = not isinstance(self.data.train_loader, Iterator)  # which would lose an item
        ahead = self.work.reads_ahead and peeks
        batches = self.data.open(self.progress, partial(self._report, report_replay), is_over=is_over, ahead=ahead)
        self.hooks.call_positioned()
        mark = partial(setattr, self.work, "is_last_seen")
        if is_shared:
            from .distributed.ranks.common_batches import read_together

            rest = (0 if self.work.is_last_seen else None) if length is None else int(min(length, last)) - batch
            marks = mark if peeks and (ahead or length is not None) and not is_over and last == inf else None
            batches = read_together(batches, self.data, self.engine, rest, self.size_of, marks)
        elif last < inf:
            batches = islice(batches, max(0, int(last) - batch))
        elif (length is None and ahead) or (length is not None and type(self.data.train_loader) not in (list, tuple)):
            from .data.last_batch import mark_last

            sure = max(0, (length or 0) - batch - peeks)  # the others may be more than the loader says
            batches = chain(islice(batches, sure), mark_last(batches, mark, ahead=peeks))
        fed, source = self.engine.feed(batches), self.data.source
        if source is None or not source.parts:
            return fed
        from .data.sources.streams import counted

        return counted(source, fed, self.progress, partial(setattr, self.data, "stream"))

    def _report(self, report_replay: Callable[[int, int], None], done: int, batches: int) -> None:
        read = count(batches, "batch", "batches")
        what = f"{read} of epoch {self.progress.epoch} again to reach the position of the checkpoint"
        if done == 0 and not self.bus.signal(ev.Replay).chain:
            logger.warning("run %r reads %s", self.name, what)
        report_replay(done, batches)
        if done == batches:
            self.note(f"read {what}")

    @abstractmethod
    def describe(self) -> str:
        """Return what will happen, in a few lines."""

    def log_plan(self) -> None:
        """Log what will happen, on the main rank, where anybody reads it."""
        if self.engine.is_main and logger.isEnabledFor(logging.INFO):
            logger.info("%s", self.report.plan())

    def prepare_comparison(self) -> None:
        """Capture the state that no state_dict holds, as the program has made it, if something is saved or resumed."""
        if self.checkpoints.is_resuming or self.bus.signal(ev.SavePoint).chain:
            from .checkpoint.state.rates import base_rates
            from .objects.run_state import ObjectState

            with self.evaluating_weights():  # as at a save
                self.checkpoints.objects = ObjectState.of(self)
            self.checkpoints.given_rates = base_rates(self.optimizers)

    def evaluating_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights to evaluate and to save."""
        return nullcontext() if self.modes is None else self.modes.evaluating()

    def comparing_start(self) -> AbstractContextManager[None]:
        """Return a context for the handlers of `EpochStart`, which compares what they do in a resumed epoch."""
        objects = self.checkpoints.objects
        return nullcontext() if objects is None else objects.comparing_start(self)

    def advance(self) -> None:
        """Count the epoch, which has ended, and begin the work of another."""
        self.control.close_epoch()
        self._begin_work()
        self.data.stream = None
        self.progress.end_epoch()
        self.data.advance()

    def _begin_work(self) -> None:
        self.work = EpochWork()
        self.loss: Tensor | None = None  # these two are set in every step, so they are no properties, which cost more
        self.outputs: Any = None

    def discard_epoch(self) -> None:
        """Discard the epoch: its requests, its window, its numbers."""
        self.hooks.settle()  # so that nothing of it is emitted later
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
            StrictError: they have warned, and the trainer is strict.
            ValueError: one of them has put modules into the task that would not be trained.
        """
        if not self.bus.receiver_count:
            yield
        else:
            from .stepping.changes import InitialModules

            given = InitialModules(self.task)
            with self.isolating():
                yield
            given.check(self.optimizers.values(), self.engine.world_size)
        if text := warning_of_frozen(self.modules):
            self.warn(text)
        self.report.raise_if_strict()

    def isolating(self) -> AbstractContextManager[None]:
        """Plan the filters; return a context in which a plugin can isolate observers."""
        from ..plugins.filters import Filter
        from ..plugins.isolation import isolation

        Filter.plan_all(self)
        return isolation(self.bus, self.plugins, self.hooks)

    def emit(self, event: Event) -> None:
        """Emit an event on this run's bus; what waits for a positioned loader is done after one that is apart."""
        self.report.emitted.add(type(event))
        if not event.apart:
            self.bus.signal(type(event)).emit(self, event)
            return
        hooks = self.hooks
        waiting, hooks.positioned = hooks.positioned, []
        try:
            self.bus.signal(type(event)).emit(self, event)
            hooks.call_positioned()
        finally:
            hooks.positioned = waiting


def _windows(settings: Settings, run: RunContext) -> Windows:
    if settings.several:
        from .stepping.named_windows import NamedWindows

        made: Windows = NamedWindows(settings.optimizers, settings.schedulers)
    else:
        made = Windows(settings.optimizers, settings.schedulers)
    if settings.allow_unused_parameters:
        for window in made.by_name.values():
            window.without_gradient = []
    made.weigh = partial(_weigh, run)
    return made


def _weigh(run: RunContext, count: Any) -> None:
    from .stepping.counts import weigh

    weigh(run, count)


def _control(run: RunContext) -> Control:
    """Return the control of this process, or of all ranks."""
    if run.engine.world_size == 1:
        control = Control(run.progress)
    else:
        from .distributed.ranks.shared_control import SharedControl

        control = SharedControl(run)
    control.max_skips = run.settings.max_skipped_steps
    return control
