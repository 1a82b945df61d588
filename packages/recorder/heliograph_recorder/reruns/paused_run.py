"""A recorded run that is done again, and waits at an event."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from heliograph import GradientsReady, Plugins, Run, RunResult
from heliograph.events import Event
from heliograph.spi import capture, check_whole_number, on_main, restore
from torch import Tensor

from ..divergence.report import Divergence
from .change import RepeatedChange
from .comparison import Comparison
from .errors import NotExact
from .folder import CommonFolder
from .paused_thread import PausedThread, Wanted
from .program import Program, Rerun
from .recorded import Origin, RecordedRun
from .requests import RepeatedRequests, repeatable

if TYPE_CHECKING:
    from heliograph.core.context import RunContext

T = TypeVar("T")


class PausedRun:
    """A run that waits at an event, after all handlers of it; `close` it, or use it as a context.

    The training is in a thread of its own, in which nothing happens while it waits: everything of it may be looked at.

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
        self._former: dict[str, Any] | None = capture()
        self._folder = CommonFolder(parent)
        self._notes = [f"skipped: {each}" for each in origin.skipped] + recorded.silence(origin)
        self._comparison: Comparison | None = None
        self._thread = PausedThread(lambda: self._train(program))

    def __repr__(self) -> str:
        where = "ended" if self._thread.event is None else f"at {self._thread.event.name}"
        return f"<PausedRun: {where}, step {self.run.progress.steps}, batch {self.run.progress.batches}>"

    @property
    def run(self) -> Run:
        """The run: its progress, control, engine, loss, metrics, and all else that handlers are given.

        Raises:
            RuntimeError: the training has not begun.
        """
        if self._thread.run is None:
            raise RuntimeError("The training has not begun.")
        return self._thread.run

    @property
    def notes(self) -> list[str]:
        """What is not as it was in the recorded run, or could not be compared."""
        return self._notes + [note for each in self._repeated for note in each.notes] + self._inexact

    @property
    def event(self) -> Event | None:
        """The event at which it waits; None when the training has ended."""
        return self._thread.event

    @property
    def result(self) -> RunResult | None:
        """How the training ended, None before."""
        return self._thread.result

    @property
    def batch(self) -> Any:
        """The batch in hand."""
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
        """The gradients that there are, by the names of their parameters: `model.0.weight`."""
        return {
            f"{module}.{name}": parameter.grad
            for module, each in self.run.modules.items()
            for name, parameter in each.named_parameters()
            if parameter.grad is not None
        }

    @property
    def comparison(self) -> Divergence:
        """What was done again until now, compared with what was recorded. On several ranks a collective."""
        engine: Any = self.run.engine
        with nullcontext() if self._thread.event is not None else engine.process():  # left when the training ended
            return on_main(engine, self._compare)

    def go_to(self, wanted: Wanted) -> Event | None:
        """Continue to the first event for which a function of the run and the event is true.

        Returns:
            The event; None when the training has ended before.

        Raises:
            NotExact: the rerun may differ from the recording, or does.
        """
        try:
            self._thread.go_to(wanted)
        except Exception:
            for refusal in [each.refusal for each in self._repeated if each.refusal is not None]:
                raise refusal from None  # itself, whatever plugins have made of it
            raise
        self._check()
        return self.event

    @contextmanager
    def within(self, context: AbstractContextManager[T]) -> Iterator[T]:
        """Let the training continue within a context, such as a mode of torch, which is one of its thread.

        Both the beginning and the end are where it waits.

        Raises:
            RuntimeError: the training does not wait there.
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
        """Continue to the next event; return it, or None when the training has ended.

        Raises:
            RuntimeError: the training has ended; or there are several ranks, which do not have the same events.
            NotExact: the rerun may differ from the recording, or does.
        """
        if self.run.engine.world_size > 1:
            raise RuntimeError("On several ranks the events are not the same on each: continue with next_step().")
        return self.go_to(lambda *_: True)

    def next_step(self) -> Event | None:
        """Continue to right before the next optimizer step, where its gradients are whole."""
        return self.go_to_step(self.run.progress.steps + (isinstance(self.event, GradientsReady)) + 1)

    def go_to_step(self, step: int) -> Event | None:
        """Continue to right before an optimizer step, from 1.

        Raises:
            ValueError: the step is not a later one, or not a whole number, or the training has ended before it.
            NotExact: the rerun may differ from the recording, or does.
        """
        if self._thread.run is not None:
            progress, waits = self.run.progress, isinstance(self.event, GradientsReady)
            if check_whole_number("step", step, at_least=1) <= progress.steps + waits:
                where = f"within step {progress.steps + 1}" if waits else f"after step {progress.steps}"
                raise ValueError(f"Step {step} has begun already: the run waits {where}. Another goto goes to it.")
        found = self.go_to(lambda run, event: isinstance(event, GradientsReady) and _is_next(run, step))
        if found is None:
            raise ValueError(f"The training has ended before step {step}: {self.result!r}.")
        return found

    def finish(self) -> RunResult:
        """Continue to the end of the training, and return its result."""
        self.go_to(lambda *_: False)
        assert self.result is not None  # else it has failed
        return self.result

    def close(self) -> None:
        """Leave the training where it is; the global random generators are as they were before `goto`."""
        try:
            self._thread.close()
        finally:
            former, self._former = self._former, None
            if former is not None:
                restore(former)
            self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _train(self, program: Program) -> RunResult:
        origin = self._origin
        rerun = Rerun(program, self._folder.path, origin.path)
        self._comparison = Comparison(self._recorded, origin, rerun.recorder)
        self._notes += rerun.notes
        requests = list(repeatable(self._recorded.requests_after(origin), ends=True))
        repeated = RepeatedRequests(requests, rerun.left_out, resumes=origin.path is not None, exact=self._exact)
        self._repeated.append(repeated)
        for each in self._repeated:
            each.subscribe(rerun.trainer)
        self._thread.subscribe(rerun.trainer.bus, left_out=rerun.left_out, recorder=rerun.recorder.name)
        return rerun.trainer.fit(**{**rerun.options, "on_interrupt": "raise"})

    def _compare(self) -> Divergence:
        assert self._comparison is not None  # it has begun
        return self._comparison.compare()

    def _check(self) -> None:
        """Raise unless the run is as it was, or note why it may not be."""
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
    """Return whether the gradients that are whole now are those of a step; of several optimizers, of the first one."""
    stepping = cast("RunContext", run).stepping
    return run.progress.steps >= step - 1 and not run.control.drops_step and not stepping.has_stepped
