"""`goto`: repeats a recorded run up to a step, and pauses there."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

from heliograph import BatchStart, Bus, GradientsReady, Lane, Log, PluginChanged, Plugins, Run, RunResult, Trainer
from heliograph.events import CATALOGUE, Event, FunctionName, Subscription
from heliograph.spi import capture, check_flag, check_whole_number, describe, membership, on_main, restore
from torch import Tensor

from ..divergence.compare import Divergence
from .program import Change, NotExact, Program, Rerun, change_of, connect_before_batches, make_change
from .recorded import Origin, RecordedRun, RerunComparison
from .requests import RepeatedRequests, requests_of_people

if TYPE_CHECKING:
    from heliograph.core.context import RunContext

T = TypeVar("T")
Wanted = Callable[[Run, Event], bool]
PREFIX = "heliograph-goto-"


class LeftTraining(BaseException):
    """Ends a training that is not continued."""


class PausedThread:
    """Trains in a thread, and pauses at wanted events, so that another thread can inspect the training.

    Draws from the global generators during a pause do not affect the training.

    Args:
        train: called in the thread.

    Attributes:
        run: None before its first event.
        event: the event of the pause; None outside of a pause.
        result: None before the end of the training.
    """

    def __init__(self, train: Callable[[], RunResult]) -> None:
        self.run: Run | None = None
        self.event: Event | None = None
        self.result: RunResult | None = None
        self._train, self._error = train, list[BaseException]()
        self._wanted: Wanted = lambda *_: False
        self._work: Callable[[], object] | None = None  # a function to call in the thread
        self._state: Literal["new", "running", "waiting", "ended"] = "new"
        self._changed = Condition()
        self._is_left = False
        context = contextvars.copy_context()
        self._thread = Thread(target=lambda: context.run(self._run), name="heliograph-rerun", daemon=True)

    def subscribe(self, bus: Bus, *, left_out: Collection[str], recorder: str) -> None:
        """Handle all events of a bus, after all other handlers.

        `Log` is handled only if plugins of the recorded run handle it: without a handler, the loop does not collect
        losses for it, and the rerun must do the same.

        Args:
            bus: of the training.
            left_out: the names of plugins that are disabled in the rerun only.
            recorder: the name of the recorder of the rerun.
        """
        handles = {
            event: bus.on(event, self._handle, lane=Lane.REPORT)
            for event in dict.fromkeys([*CATALOGUE, *(signal.event for signal in bus.signals())])
        }
        signal, rerun_only = bus.signal(Log), (describe(self._handle), recorder)

        def follow(run: Run | None, event: PluginChanged | None) -> None:  # noqa: ARG001  # a handler
            subscriptions = [entry for entry in signal.subscriptions.values() if entry.owner not in rerun_only]
            is_handled = any(not entry.paused or entry.owner in left_out for entry in subscriptions)
            (handles[Log].resume if is_handled else handles[Log].pause)()

        follow(None, None)
        before_all = Subscription((Lane.TRANSFORM, -3), FunctionName(describe(follow)))
        bus.signal(PluginChanged).connect(follow, weak=False, subscription=before_all)

    def go_to(self, wanted: Wanted) -> bool:
        """Train until an event is wanted; return False if the training ends first.

        Errors of the training and of `wanted` are raised here. After an error of `wanted` or a KeyboardInterrupt, the
        training pauses at that event or the next.
        """
        self._wait()
        if self._state == "ended":
            raise RuntimeError("The training has ended.")
        self._wanted, self.event = wanted, None
        try:
            if self._state == "new":
                self._state = "running"
                self._thread.start()
            else:
                self._continue()
            self._wait()
        except KeyboardInterrupt:  # at any line, or the training would not pause at its next event
            self._wanted = lambda *_: True
            raise
        if self._error:
            raise self._error.pop()
        return self.event is not None

    def call(self, work: Callable[[], object]) -> None:
        """Call a function in the thread of the training, during a pause."""
        if self._state != "waiting":
            raise RuntimeError("The training is not paused at an event.")
        self._work = work
        self._continue()
        self._wait()
        if self._error:
            raise self._error.pop()

    def close(self) -> None:
        """End the training at its pause; raise an error that it had before. Closing twice does nothing."""
        self._is_left = True
        if self._state == "waiting":
            self._continue()
        if self._thread.ident is not None:
            with self._changed:  # `wait_for` releases the lock fully, even if a Ctrl-C left it acquired
                self._changed.wait_for(lambda: self._state == "ended")
            self._thread.join()
        self._state, self.event = "ended", None
        if self._error and not _was_left(self._error[0]):
            raise self._error.pop()
        self._error.clear()

    def _continue(self) -> None:
        with self._changed:
            self._state = "running"
            self._changed.notify_all()

    def _wait(self) -> None:
        """Wait until the training pauses or ends."""
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._state != "running")
        except KeyboardInterrupt:
            self._wanted = lambda *_: True
            raise

    # In the thread.

    def _run(self) -> None:
        try:
            self.result = self._train()
        except BaseException as error:  # noqa: BLE001  # raised in the waiting thread
            self._error.append(error)
        with self._changed:
            self._state = "ended"
            self._changed.notify_all()

    def _handle(self, run: Run, event: Event) -> None:
        self.run = run
        try:
            is_wanted = not self._is_left and self._wanted(run, event)
        except BaseException as error:  # noqa: BLE001  # raised in the waiting thread
            self._error.append(error)
            is_wanted = True
        if is_wanted:
            self.event, draws = event, capture()
            self._stop()
            while (work := self._work) is not None:
                self._work = None
                try:
                    work()
                except BaseException as error:  # noqa: BLE001  # raised in the waiting thread
                    self._error.append(error)
                self._stop()
            restore(draws)
        if self._is_left and event.name not in ("run_failed", "run_closed"):
            raise LeftTraining

    def _stop(self) -> None:
        with self._changed:
            self._state = "waiting"
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._state != "waiting" or self._is_left)
            self._state = "running"


def _was_left(error: Any) -> bool:
    """True if an error is, or was caused by, LeftTraining."""
    while error is not None:
        if isinstance(error, LeftTraining):
            return True
        error = error.__cause__
    return False


class CommonFolder:
    """A temporary folder that the main rank creates and removes, and whose path all ranks have.

    Args:
        parent: where to create it; on several machines, all must see it.
    """

    def __init__(self, parent: str | Path | None) -> None:
        self._created: TemporaryDirectory[str] | None = None
        if membership().world_size == 1:
            self.path = self._create(parent)
            return
        from heliograph import DDPEngine  # slow to import

        engine = DDPEngine(device="cpu")  # the engine of the run is made by the program, which needs the folder
        with engine.process():
            self.path = on_main(engine, lambda: self._create(parent))

    def _create(self, parent: str | Path | None) -> Path:
        self._created = TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
        return Path(self._created.name)

    def remove(self) -> None:
        if self._created is not None:
            self._created.cleanup()


class PausedRun:
    """A run that is paused at an event, after all its handlers; `close` it, or use it as a context.

    The training has its own thread, which does nothing during the pause, so you can inspect everything.
    """

    def __init__(
        self,
        recorded: RecordedRun,
        program: Program,
        origin: Origin,
        parent: str | Path | None,
        *,
        change: Change | None = None,
        change_step: int | None = None,
        exact: bool,
    ) -> None:
        self._recorded, self._origin, self._exact = recorded, origin, exact
        self._change, self._change_step = change, change_step
        self._repeated: RepeatedRequests | None = None
        self._inexact: list[str] = []
        self._generators: dict[str, Any] | None = capture()
        self._folder = CommonFolder(parent)
        self._notes = [f"skipped: {reason}" for reason in origin.skipped] + recorded.silence(origin)
        self._comparison: RerunComparison | None = None
        self._thread = PausedThread(lambda: self._train(program))

    def __repr__(self) -> str:
        position = "ended" if self._thread.event is None else f"at {self._thread.event.name}"
        return f"<PausedRun: {position}, step {self.run.progress.steps}, batch {self.run.progress.batches}>"

    @property
    def run(self) -> Run:
        """The run, as handlers receive it.

        Raises:
            RuntimeError: the training has not begun.
        """
        if self._thread.run is None:
            raise RuntimeError("The training has not begun.")
        return self._thread.run

    @property
    def notes(self) -> list[str]:
        """Differences from the recorded run, and what could not be compared."""
        return self._notes + (self._repeated.notes if self._repeated is not None else []) + self._inexact

    @property
    def event(self) -> Event | None:
        """The event of the pause; None after the end of the training."""
        return self._thread.event

    @property
    def result(self) -> RunResult | None:
        """The result of the training; None before its end."""
        return self._thread.result

    @property
    def batch(self) -> Any:
        """The current batch."""
        return self.run.batch

    @property
    def modules(self) -> Mapping[str, Any]:
        """The modules of the task, by name."""
        return self.run.modules

    @property
    def plugins(self) -> Plugins:
        """The plugins, by name."""
        plugins: Plugins = self.run.plugins
        return plugins

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The existing gradients, by the names of their parameters, such as `model.0.weight`."""
        return {
            f"{name}.{parameter_name}": parameter.grad
            for name, module in self.run.modules.items()
            for parameter_name, parameter in module.named_parameters()
            if parameter.grad is not None
        }

    @property
    def comparison(self) -> Divergence:
        """The comparison of the rerun so far with the recording; a collective on several ranks."""
        engine: Any = self.run.engine
        with nullcontext() if self._thread.event is not None else engine.process():  # the training has left its own
            assert self._comparison is not None
            return on_main(engine, self._comparison.compare)

    def go_to(self, wanted: Wanted) -> Event | None:
        """Continue to the first event for which a function of the run and the event returns true.

        Returns:
            The event; None if the training ended first.

        Raises:
            NotExact: the rerun differs from the recording, or may differ.
        """
        self._thread.go_to(wanted)
        self._check()
        return self.event

    @contextmanager
    def within(self, context: AbstractContextManager[T]) -> Iterator[T]:
        """Continue within a context in the thread of the training, such as a mode of torch.

        The context begins and ends during pauses.

        Raises:
            RuntimeError: the training is not paused.
        """
        entered: list[T] = []
        self._thread.call(lambda: entered.append(context.__enter__()))
        try:
            yield entered[0]
        finally:
            self._thread.call(lambda: context.__exit__(None, None, None))

    def next_event(self) -> Event | None:
        """Continue to the next event; return it, or None at the end of the training.

        Raises:
            RuntimeError: the training has ended; or there are several ranks, which have different events.
            NotExact: the rerun differs from the recording, or may differ.
        """
        if self.run.engine.world_size > 1:
            raise RuntimeError("next_event() needs one rank, since ranks have different events: use next_step().")
        return self.go_to(lambda *_: True)

    def next_step(self) -> Event | None:
        """Continue to right before the next optimizer step, when its gradients are complete."""
        return self.go_to_step(self.run.progress.steps + (isinstance(self.event, GradientsReady)) + 1)

    def go_to_step(self, step: int) -> Event | None:
        """Continue to right before an optimizer step, from 1.

        Raises:
            ValueError: the step is not a later one or not a whole number, or the training ended before it.
            NotExact: the rerun differs from the recording, or may differ.
        """
        if self._thread.run is not None:
            progress, in_step = self.run.progress, isinstance(self.event, GradientsReady)
            if check_whole_number("step", step, at_least=1) <= progress.steps + in_step:
                raise ValueError(f"Step {step} has begun already: the run has done {progress.steps}. Call goto again.")
        event = self.go_to(lambda run, event: isinstance(event, GradientsReady) and _is_next(run, step))
        if event is None:
            raise ValueError(f"The training has ended before step {step}: {self.result!r}.")
        return event

    def finish(self) -> RunResult:
        """Continue to the end of the training, and return its result."""
        self.go_to(lambda *_: False)
        assert self.result is not None
        return self.result

    def close(self) -> None:
        """End the training here, and restore the global generators to their states before `goto`."""
        try:
            self._thread.close()
        finally:
            generators, self._generators = self._generators, None
            if generators is not None:
                restore(generators)
            self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _train(self, program: Program) -> RunResult:
        origin = self._origin
        rerun = Rerun(program, self._folder.path, origin.path)
        self._comparison = RerunComparison(self._recorded, origin, rerun.recorder)
        self._notes += rerun.notes
        requests = requests_of_people(self._recorded.recording, origin.begin)
        self._repeated = RepeatedRequests(requests, rerun.left_out, exact=self._exact)
        self._repeated.subscribe(rerun.trainer)
        if self._change is not None and self._change_step is not None:
            _repeat_change(rerun.trainer, self._change, self._change_step)
        self._thread.subscribe(rerun.trainer.bus, left_out=rerun.left_out, recorder=rerun.recorder.name)
        return rerun.trainer.fit(**{**rerun.options, "on_interrupt": "raise"})

    def _check(self) -> None:
        is_resumed = self._origin.path is not None
        reasons = self.run.data.resume_facts().sentences
        if not self._exact:
            self._inexact = [f"the resumed run may differ: {reason}" for reason in reasons] if is_resumed else []
            return
        if reasons and is_resumed:
            raise NotExact(reasons)
        if (first := self.comparison.first) is not None:
            edited = cast("RunContext", self.run).checkpoints.edited
            raise NotExact((*reasons, *(f"the program sets {path} differently" for path in edited)), first)


def _repeat_change(trainer: Trainer, change: Change, step: int) -> None:
    """Make the change of a fork again, right before the first batch after a step."""
    is_done = False

    def make(run: Run, event: BatchStart) -> None:  # noqa: ARG001  # a handler
        nonlocal is_done
        if not is_done and run.progress.steps >= step:
            is_done = True
            make_change(run, change)

    connect_before_batches(trainer.bus, make, "fork")


def _is_next(run: Run, step: int) -> bool:
    """True if the gradients of a step are complete; of its first optimizer, if there are several."""
    stepping = cast("RunContext", run).stepping
    return run.progress.steps >= step - 1 and not run.control.drops_step and not stepping.has_stepped


def goto(
    run: str | Path,
    program: Program,
    *,
    step: int,
    change: Change | str | None = None,
    exact: bool = True,
    folder: str | Path | None = None,
) -> PausedRun:
    """Repeat a recorded run up to right before an optimizer step, and pause there.

    The rerun starts at the newest checkpoint before that step, or at the beginning. Everything that happens is compared
    with the recording, down to the last bit if it has digests. Requests that people made with `Remote` are repeated, in
    their names. The plugins of the program write to a temporary folder. Plugins that report to other services are left
    out, and so is `Preemption`. Your own plugins without `rehearse(folder)` write to their usual places; `notes` names
    them.

        with h.goto("runs/x", "train:make_trainer", step=1200) as paused:
            print(paused.batch, paused.gradients["model.0.weight"].norm())
            paused.next_step()

    On several ranks, every rank calls `goto` with the same arguments, and then the same methods.

    Args:
        run: the folder of the run, or its recording.
        program: the function that made the trainer, or its name as module:function. It returns the trainer and the
            keywords of its `fit`, and takes nothing, or a folder to write to.
        step: the optimizer step, from 1.
        change: for a fork, the function that changed it, or its name as module:function; called at the same step.
        exact: refuse a rerun that differs or may differ.
        folder: the parent of the temporary folder, by default that of the system. On several machines, all must see it.

    Raises:
        NotExact: a resume of this program may differ, the rerun differs from the recording, or another function changed
            the fork.
        ValueError: there is no such step, the program has no `Checkpoint`, the run ended first, or `change` is given
            for a run that is not a changed fork.
        TypeError: the change is not a function.
        FileNotFoundError: there is no recording.
        UsageError: the program or the change is not such a function.
    """
    check_flag("exact", exact)
    function, recorded = change_of("goto", change), RecordedRun(run)
    wanted = recorded.check_step(step, least=1)
    origin = recorded.origin(wanted - 1)
    if exact:
        recorded.check_ranks()
    change_step = recorded.check_change(origin, function, exact=exact)
    paused = PausedRun(recorded, program, origin, folder, change=function, change_step=change_step, exact=exact)
    try:
        paused.go_to_step(wanted)
    except BaseException:  # including Ctrl-C, so that neither the thread nor the folder remains
        paused.close()
        raise
    return paused
