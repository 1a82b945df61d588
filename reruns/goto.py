"""`goto`: a recorded run, done again up to a step, and alive there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, TypeVar

from heliograph.builtin_callbacks.recorder.diverge.compare import compare
from heliograph.builtin_callbacks.recorder.diverge.course import course_of
from heliograph.builtin_callbacks.recorder.diverge.report import Divergence
from heliograph.builtin_callbacks.recorder.format.reader import read
from heliograph.core.data.draws import rng
from heliograph.core.distributed.ranks.failure import on_main
from heliograph.core.result import RunResult
from heliograph.events import Event, GradientsReady, Run
from heliograph.events.checks import check_flag
from heliograph.plugins import Plugins
from heliograph.reruns.errors import NotExact
from heliograph.reruns.program import Program, Rerun
from heliograph.reruns.recorded import Origin, RecordedRun
from heliograph.reruns.stage import Stage, Wanted
from torch import Tensor

T = TypeVar("T")


def goto(
    run: str | Path, program: Program, *, step: int, exact: bool = True, folder: str | Path | None = None
) -> PausedRun:
    """Do a recorded run again, up to right before an optimizer step, and leave everything alive there.

    The newest checkpoint before that step is loaded, or the run begins at its start. From there on all that happens is
    compared with what was recorded, down to the last bit where `Recorder(digests=True)` recorded it. Nothing that the
    run has left is changed: what the program's plugins write goes to a temporary folder, and those that cannot be
    redirected are left out.

        with h.goto("runs/x", "train:make_trainer", step=1200) as paused:
            print(paused.batch, paused.gradients["model.0.weight"].norm())
            paused.next_step()

    On several ranks every rank calls it, with the same arguments, and then the same methods.

    Args:
        run: its folder, or its recording.
        program: the function that made the trainer: returns it with the keywords of its `fit`, and takes nothing, or a
            folder to write to; or the name of that function, `module:function`.
        step: which optimizer step, from 1.
        exact: whether to refuse what is not exact; False goes there all the same.
        folder: where the temporary folder is made, if not where the system makes them.

    Raises:
        NotExact: a resume of this program is not exact, or what is done again differs from what was recorded.
        ValueError: there is no such step, the program has no `Checkpoint`, or the run has ended before.
        FileNotFoundError: there is no recording.
        UsageError: the program is not such a function.
    """
    check_flag("exact", exact)
    recorded = RecordedRun(run)
    wanted = recorded.check_step(step, least=1)
    paused = PausedRun(recorded, program, recorded.origin(wanted - 1), folder, exact=exact)
    try:
        paused.go_to_step(wanted)
    except BaseException:
        paused.close()
        raise
    return paused


class PausedRun:
    """A run that waits at an event, after all handlers of it; `close` it, or use it as a context.

    The training is in a thread of its own, in which nothing happens while it waits: everything of it may be looked at.

    Attributes:
        notes: what is not as it was in the recorded run.
    """

    def __init__(
        self, recorded: RecordedRun, program: Program, origin: Origin, parent: str | Path | None, *, exact: bool
    ) -> None:
        self._recorded, self._origin, self._exact = recorded, origin, exact
        self._former = rng.capture()
        self._folder = TemporaryDirectory(prefix="heliograph-goto-", dir=parent, ignore_cleanup_errors=True)
        self.notes = [f"skipped: {each}" for each in origin.skipped]
        self._rerun: Rerun | None = None
        self._stage = Stage(lambda: self._train(program))

    def __repr__(self) -> str:
        where = "ended" if self._stage.event is None else f"at {self._stage.event.name}"
        return f"<PausedRun: {where}, step {self.run.progress.steps}, batch {self.run.progress.batches}>"

    @property
    def run(self) -> Run:
        """The run: its progress, control, engine, loss, metrics, and all else that handlers are given."""
        assert self._stage.run is not None
        return self._stage.run

    @property
    def event(self) -> Event | None:
        """The event at which it waits; None when the training has ended."""
        return self._stage.event

    @property
    def result(self) -> RunResult | None:
        """How the training ended, None before."""
        return self._stage.result

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
        return on_main(self.run.engine, self._compare)

    def go_to(self, wanted: Wanted) -> Event | None:
        """Continue to the first event for which a function of the run and the event is true.

        Returns:
            The event; None when the training has ended before.

        Raises:
            NotExact: it is not exact.
        """
        self._stage.go_to(wanted)
        if self._exact:
            self._check()
        return self.event

    @contextmanager
    def within(self, context: AbstractContextManager[T]) -> Iterator[T]:
        """Let the training continue within a context, such as a mode of torch, which is one of its thread.

        Both the beginning and the end are where it waits.
        """
        entered: list[T] = []
        self._stage.call(lambda: entered.append(context.__enter__()))
        try:
            yield entered[0]
        finally:
            self._stage.call(lambda: context.__exit__(None, None, None))

    def next_event(self) -> Event | None:
        """Continue to the next event; return it, or None when the training has ended."""
        return self.go_to(lambda *_: True)

    def next_step(self) -> Event | None:
        """Continue to right before the next optimizer step, where its gradients are whole."""
        return self.go_to_step(self.run.progress.steps + (isinstance(self.event, GradientsReady)) + 1)

    def go_to_step(self, step: int) -> Event | None:
        """Continue to right before an optimizer step, from 1.

        Raises:
            ValueError: the training has ended before.
            NotExact: it is not exact.
        """
        found = self.go_to(lambda run, event: isinstance(event, GradientsReady) and run.progress.steps >= step - 1)
        if found is None:
            raise ValueError(f"The training has ended before step {step}: {self.result!r}.")
        return found

    def finish(self) -> RunResult:
        """Continue to the end of the training, and return its result."""
        self.go_to(lambda *_: False)
        assert self.result is not None
        return self.result

    def close(self) -> None:
        """Leave the training where it is; the global random generators are as they were before `goto`."""
        try:
            self._stage.close()
        finally:
            rng.restore(self._former)
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _since(self) -> tuple[int, int] | None:
        return None if self._origin.path is None else (self._origin.batches, self._origin.step)

    def _train(self, program: Program) -> RunResult:
        rerun = self._rerun = Rerun(program, Path(self._folder.name), self._origin.path)
        self.notes += rerun.notes
        self._stage.subscribe(rerun.trainer.bus)
        return rerun.trainer.fit(**{**rerun.options, "on_interrupt": "raise"})

    def _compare(self) -> Divergence:
        assert self._rerun is not None
        self._rerun.recorder.flush()
        assert self._rerun.recorder.path is not None
        again = course_of(read(self._rerun.recorder.path), "the run that is done again", self._since)
        return compare(self._recorded.course_after(self._origin), again, whole=False)

    def _check(self) -> None:
        """Raise unless the run is as it was."""
        level, reasons = self.run.data.guarantee()
        if level != "exact" and self._origin.path is not None:
            raise NotExact(reasons)
        if (first := self.comparison.first) is not None:
            raise NotExact(reasons, first)
