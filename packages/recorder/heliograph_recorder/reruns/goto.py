"""`goto`: repeats a recorded run up to a step, and pauses there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from heliograph import GradientsReady, Plugins, Run, RunResult
from heliograph.events import Event
from heliograph.spi import capture, check_flag, check_whole_number, membership, on_main, restore
from torch import Tensor

from ..divergence.report import Divergence
from .change import Change, RepeatedChange, change_of
from .errors import NotExact
from .paused_thread import PausedThread, Wanted
from .program import Program, Rerun
from .recorded import Origin, RecordedRun, RerunComparison
from .requests import RepeatedRequests, repeatable

if TYPE_CHECKING:
    from heliograph.core.context import RunContext

T = TypeVar("T")
PREFIX = "heliograph-goto-"


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
        changed: RepeatedChange | None,
        exact: bool,
    ) -> None:
        self._recorded, self._origin, self._exact = recorded, origin, exact
        self._repeated: list[RepeatedChange | RepeatedRequests] = [] if changed is None else [changed]
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
        return self._notes + [note for repeated in self._repeated for note in repeated.notes] + self._inexact

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
            return on_main(engine, self._compare)

    def go_to(self, wanted: Wanted) -> Event | None:
        """Continue to the first event for which a function of the run and the event returns true.

        Returns:
            The event; None if the training ended first.

        Raises:
            NotExact: the rerun differs from the recording, or may differ.
        """
        try:
            self._thread.go_to(wanted)
        except Exception:
            for refusal in [repeated.refusal for repeated in self._repeated if repeated.refusal is not None]:
                raise refusal from None  # a plugin may have raised another error from it
            raise
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
        error: BaseException | None = None
        try:
            yield entered[0]
        except BaseException as raised:
            error = raised
            raise
        finally:
            traceback = None if error is None else error.__traceback__
            self._thread.call(lambda: context.__exit__(None if error is None else type(error), error, traceback))

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
                position = f"within step {progress.steps + 1}" if in_step else f"after step {progress.steps}"
                raise ValueError(f"Step {step} has begun already: the run is paused {position}. Call goto again.")
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
        requests = repeatable(self._recorded.requests_after(origin), ends=True)
        self._repeated.append(
            RepeatedRequests(requests, rerun.left_out, resumes=origin.path is not None, exact=self._exact)
        )
        for repeated in self._repeated:
            repeated.subscribe(rerun.trainer)
        self._thread.subscribe(rerun.trainer.bus, left_out=rerun.left_out, recorder=rerun.recorder.name)
        return rerun.trainer.fit(**{**rerun.options, "on_interrupt": "raise"})

    def _compare(self) -> Divergence:
        assert self._comparison is not None
        return self._comparison.compare()

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
    changed = recorded.repeated_change(origin, function, exact=exact)
    paused = PausedRun(recorded, program, origin, folder, changed=changed, exact=exact)
    try:
        with recorded.naming_ranks() if exact else nullcontext():
            paused.go_to_step(wanted)
    except BaseException:  # including Ctrl-C, so that neither the thread nor the folder remains
        paused.close()
        raise
    return paused
