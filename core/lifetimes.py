"""The parts of a run by lifetime; a part is reset by creating a new one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from torch import Tensor

from ..events import Event, Progress, RunFailed, Status, TrainStart, is_within
from ..events.checks import check_whole_number, count, describe_error
from .result import RunResult, StrictError

if TYPE_CHECKING:
    from weakref import ReferenceType

    from ..events import CheckpointSource, Control
    from .checkpoint.schema import BatchChange
    from .metrics.log_rows import LogRows
    from .objects.restore import ResumedObjects
    from .objects.run_state import ObjectState
    from .outputs import Collection
    from .stepping.counts import Weight

Action = Callable[[], None]


@dataclass(slots=True)
class EpochWork:
    """The work of one epoch.

    Attributes:
        batch: the current batch.
        in_hand: whether a batch is being processed.
        is_unstepped: whether the user's own loop has yet to call `run.step(loss)` for it.
        is_exhausted: whether the loader has ended.
        is_last_seen: whether the current batch is the loader's last; None if only its length can answer.
        reads_ahead: whether a loader without a length is read one item ahead to find its last batch; False in the
            user's own loop, which may produce the data that it reads.
        has_begun: whether `EpochStart` was emitted.
        batches: the batches that the user's own loop reads.
        contexts: contexts that stay open until the batch ends.
        casts: whether the user's own loop computes under autocast.
        autocast: holds that context while the user's own loop has a batch.
        claims: whether the values of a mean are tracked or returned, by its name.
        weight: the argument of `run.stepping.weigh` for the current batch.
        averaged: the gradients that the user's own loop has averaged over the ranks, by the ids of their parameters.
        collection: the collected values of the running evaluation.
    """

    batch: Any = None
    in_hand: bool = False
    is_unstepped: bool = False
    is_exhausted: bool = False
    is_last_seen: bool | None = None
    reads_ahead: bool = True
    has_begun: bool = False
    batches: Iterator[Any] = field(default_factory=lambda: iter(()))
    contexts: ExitStack = field(default_factory=ExitStack)
    casts: bool = False
    autocast: ExitStack = field(default_factory=ExitStack)
    claims: dict[str, str] = field(default_factory=dict)
    weight: Weight | None = None
    averaged: dict[int, ReferenceType[Tensor] | None] = field(default_factory=dict)
    collection: Collection | None = None


@dataclass(slots=True)
class Checkpoints:
    """`run.checkpoints`; `heliograph.events.run.RunCheckpoints` documents the part for plugins.

    Attributes:
        training_id: drawn from the system, not from a seeded generator.
        pending_state: a state that is about to be loaded, and its file; None before and after.
        path: the file of the state that is being loaded, or was loaded last.
        is_resume: True in a resume, False in a rollback.
        batch_change: how to change the learning rates if the global batch changed.
        restored: paths of restored state that no state_dict covers.
        edited: paths of such state that the program sets to another value than the saving run did.
        before: the world size and the loader workers of the run that saved.
        fresh_plugins: plugins without state in the checkpoint.
        unclaimed_states: states without a plugin.
        objects: the state that no state_dict covers; None if nothing is saved or resumed.
        resumed_objects: restores and compares it; None before a state is loaded.
        given_rates: the learning rates that the program set at the start; None if nothing is saved or resumed.
    """

    best: Path | None = None
    last: Path | None = None
    training_id: str = field(default_factory=lambda: uuid4().hex)
    pending_state: tuple[Mapping[str, Any], Path | None] | None = None
    path: Path | None = None
    is_resume: bool = False
    source: CheckpointSource | None = None
    in_boundary: bool = False
    resumed_from: Path | None = None
    resumed_at: Progress | None = None
    batch_change: BatchChange = "refuse"
    batch_note: str | None = None
    restored: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)
    before: tuple[int, int | None] | None = None
    fresh_plugins: tuple[str, ...] = ()
    unclaimed_states: tuple[str, ...] = ()
    objects: ObjectState | None = None
    resumed_objects: ResumedObjects | None = None
    given_rates: list[float] | None = None
    forked_from: Mapping[str, Any] | None = None
    verified_steps: int = 0
    verified_before: str | None = None
    difference: str | None = None
    unverified: str | None = None

    @property
    def is_resuming(self) -> bool:
        return self.pending_state is not None


@dataclass(slots=True)
class Report:
    """`run.report`, the basis of the result; `heliograph.events.run.RunReport` documents the part for plugins.

    Attributes:
        began: when the run was created, by `perf_counter`.
        started: whether a training began.
        finished: whether it is over.
        held: the state at the end of a training, captured before its last log and validation; None at other times.
        at_save_point: whether the state is being saved in a boundary that then only emits `ShouldStop`.
        is_strict: whether warnings are raised.
        emitted: the emitted event classes, except those of every batch.
        predictions: the outputs of all samples.
        rows: the logged rows, or None.
        result: the outcome, once the run is closed.
    """

    run: Any
    began: float = field(default_factory=perf_counter)
    status: Status = "completed"
    started: bool = False
    finished: bool = False
    held: Mapping[str, Any] | None = None
    at_save_point: bool = False
    has_left_group: bool = False
    recording: Path | None = None
    emitted: set[type[Event]] = field(default_factory=set)
    plugin_seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_strict: bool = False
    predictions: Any = None
    rows: LogRows | None = None
    result: RunResult = field(init=False)

    @property
    def is_replay(self) -> bool:
        return False

    @property
    def queue(self) -> Any:
        # None unless `launch` started this process.
        from .distributed.launcher import child_queue

        return child_queue()

    @property
    def ranks_meet(self) -> bool:
        control: Control = self.run.control
        return control.is_shared and control.is_due(window=self.run.stepping.window, judged=False)

    @property
    def tracks(self) -> bool:
        run = self.run
        return run.phase != "train" or bool(run.hot.log.chain) or run.control.is_shared  # another rank may log

    def plan(self) -> str:
        lines: str = self.run.describe()
        return lines

    def reason(self, error: BaseException | None) -> str:
        run, resumed_at = self.run, self.run.checkpoints.resumed_at
        progress, control = cast("Progress", run.progress), cast("Control", run.control)
        if error is not None:
            return describe_error(error)
        if self.status == "stopped" and control.stop_request is not None:
            return control.stop_request.reason
        if not run.settings.train:
            done = "predicted" if run.phase == "predict" else "evaluated"
            return f"{count(progress.evaluated, 'batch', 'batches')} {done}"
        if resumed_at is not None and progress.batches == resumed_at.batches:
            return f"nothing left to do: resumed at epoch {progress.epoch}, step {progress.steps}"
        if run.settings.epochs is not None and run.has_epochs:
            return f"{count(max(progress.epoch, run.settings.epochs), 'epoch', 'epochs')} done"
        return f"{count(progress.steps, 'step', 'steps')} done"

    def raise_if_strict(self, result: RunResult | None = None) -> None:
        if self.is_strict and self.warnings:
            raise StrictError(tuple(self.warnings), result)

    @contextmanager
    def saving(self) -> Iterator[None]:
        before, self.at_save_point = self.at_save_point, not self.finished
        yield
        self.at_save_point, self.held = before, None


@dataclass(slots=True)
class Hooks:
    """`run.hooks`; `heliograph.events.run.RunHooks` documents the part for plugins.

    Attributes:
        positioned: functions to call once, when the loader is at its position.
        settling: functions to call at every `settle()`.
        leaving: functions to call before this rank leaves its group after an error.
        closing: functions to call when the run is closed.
        apart: the context in which handlers of observers run.
        exit_status: the exit status of the process.
        exit_error: the error that `fit` raises instead of returning.
        replacement: the error to raise instead of the one that failed the run.
    """

    positioned: list[Action] = field(default_factory=list)
    settling: list[Action] = field(default_factory=list)
    leaving: list[Action] = field(default_factory=list)
    closing: ExitStack = field(default_factory=ExitStack)
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext
    exit_status: int | None = None
    exit_error: BaseException | None = None
    replacement: BaseException | None = None

    def when_positioned(self, action: Action) -> None:
        self.positioned.append(action)

    def when_settling(self, action: Action) -> None:
        if action not in self.settling:
            self.settling.append(action)

    def when_leaving(self, action: Action) -> None:
        if action not in self.leaving:
            self.leaving.append(action)

    def settle(self) -> None:
        for action in tuple(self.settling):
            action()

    def isolate_observers(self, apart: Callable[[], AbstractContextManager[Any]]) -> None:
        check_within(TrainStart, "hooks.isolate_observers")
        self.apart = apart

    def exit_with(self, status: int) -> None:
        self.exit_status = check_whole_number("An exit status", status, at_least=0, at_most=255)

    def raise_when_closed(self, error: BaseException) -> None:
        self.exit_error = error

    def replace_error(self, error: BaseException) -> None:
        check_within(RunFailed, "hooks.replace_error")
        self.replacement = error

    def call_positioned(self) -> None:
        while self.positioned:
            self.positioned.pop(0)()


def check_within(event: type[Event], verb: str) -> None:
    if not is_within(event.name):
        raise RuntimeError(f"run.{verb} has an effect in handlers of {event.__name__} only: call it there.")
