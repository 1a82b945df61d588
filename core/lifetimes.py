"""The parts of a run by how long they live: each is one object, and is reset by making a new one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from torch import Tensor

from ..events import Event, Progress
from ..events.catalogue import Status
from .result import RunResult, StrictError

if TYPE_CHECKING:
    from weakref import ReferenceType

    from ..events.run import CheckpointSource
    from .checkpoint.state.compatibility import BatchChange
    from .metrics.log_rows import LogRows
    from .objects.run_state import ObjectState
    from .outputs.collection import Collection
    from .stepping.counts import Weight

Action = Callable[[], None]


@dataclass(slots=True)
class EpochWork:
    """The work of one epoch.

    Attributes:
        batch: the current batch.
        stream: the one of several streams that it is of; None where it is of all, or there is one.
        in_hand: whether a batch is being processed.
        is_unstepped: whether the user's own loop has yet to call `run.step(loss)` for it.
        is_exhausted: whether the loader has ended.
        is_last_seen: whether the current batch is the loader's last; None if its length alone says so.
        reads_ahead: whether a loader without a length is read one item ahead, so that its last batch is known; not in
            the user's own loop, which may make what it reads.
        has_begun: whether `EpochStart` was emitted.
        batches: the batches that the user's own loop reads.
        contexts: what is open until the batch ends.
        casts: whether the user's own loop computes under autocast.
        autocast: holds that context while the user's own loop has a batch.
        claims: whether the values of a mean are tracked or returned, by its name.
        weight: what `run.weigh` was given for a batch.
        averaged: the gradients that the user's own loop has averaged over the ranks, by the ids of their parameters.
        collection: what the running evaluation collects.
    """

    batch: Any = None
    stream: str | None = None
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
class Resumption:
    """What a run continues from, and the result.

    Attributes:
        training_id: of which training the run is a part; a new one is drawn from the system, not from a generator.
        pending_state: a state that is to be applied, and its file; None before and after.
        path: the file of the state that is being applied, or was last.
        is_resume: whether it is applied in a resume, not in a roll back.
        source: where else checkpoints of the run are.
        in_boundary: whether it was saved at the end of a boundary: `ShouldStop` is still to come.
        resumed_from: the file that the run was resumed from.
        resumed_at: where that was.
        batch_change: what to do with the learning rates where the global batch changed.
        batch_note: how it changed.
        restored: paths of state that no state_dict holds, and that was restored.
        edited: paths of such state that the program sets differently than the one that saved.
        before: how many ranks and workers the run that saved had.
        fresh_plugins: plugins that found no state.
        unclaimed_states: states that no plugin claimed.
        objects: the state that no state_dict holds; None if nothing is saved or resumed.
        given_rates: the learning rates of the program that began the training; None as for `objects`.
        forked_from: the training that this one is a fork of, and where; None of others.
    """

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
    given_rates: list[float] | None = None
    forked_from: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Outcome:
    """What becomes the result of a run.

    Attributes:
        began: when the run was made, of `perf_counter`.
        started: whether a training began.
        finished: whether it is over.
        held: the state of the end of a training without what its last log and validation add; None elsewhere.
        at_save_point: whether the state is being saved in a boundary, of which only `ShouldStop` is left.
        has_left_group: whether this rank has left the others.
        is_strict: whether warnings are raised.
        emitted: the events that were emitted, but for those of every batch.
        evaluation_batches: those of the last validation or test, all sets together; None where that is unknown.
        replacement: the error to raise instead of the one that failed the run.
        exit_error: what `fit` raises instead of returning.
        predictions: the outputs of all samples.
        rows: what was logged, None where nothing was.
        result: how it went, once the run is closed.
    """

    began: float = field(default_factory=perf_counter)
    status: Status = "completed"
    started: bool = False
    finished: bool = False
    held: Mapping[str, Any] | None = None
    at_save_point: bool = False
    has_left_group: bool = False
    best_checkpoint: Path | None = None
    last_checkpoint: Path | None = None
    recording: Path | None = None
    verified_steps: int = 0
    difference: str | None = None
    emitted: set[type[Event]] = field(default_factory=set)
    evaluation_batches: int | None = None
    plugin_seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_strict: bool = False
    exit_status: int | None = None
    exit_error: BaseException | None = None
    replacement: BaseException | None = None
    predictions: Any = None
    rows: LogRows | None = None
    result: RunResult = field(init=False)

    def raise_if_strict(self, result: RunResult | None = None) -> None:
        """Raise the warnings that there are, where the trainer is strict."""
        if self.is_strict and self.warnings:
            raise StrictError(tuple(self.warnings), result)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Note that the state is being saved."""
        before, self.at_save_point = self.at_save_point, not self.finished
        yield
        self.at_save_point, self.held = before, None


@dataclass(slots=True)
class Hooks:
    """What plugins let a run call.

    Attributes:
        positioned: once, when the loader is at its position.
        settling: at every `run.settle()`.
        leaving: before this rank leaves its group for an error.
        closing: when the run is closed.
        apart: what handlers of observers run within.
    """

    positioned: list[Action] = field(default_factory=list)
    settling: list[Action] = field(default_factory=list)
    leaving: list[Action] = field(default_factory=list)
    closing: ExitStack = field(default_factory=ExitStack)
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext

    def call_positioned(self) -> None:
        """Call what waits for the loader."""
        while self.positioned:
            self.positioned.pop(0)()
