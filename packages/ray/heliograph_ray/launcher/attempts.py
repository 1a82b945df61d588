"""The values that a call on Ray returns, and a summary of each attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Literal
from uuid import uuid4

from heliograph import RunResult

from ..session import Notice
from .mailbox import Ended, Envelope, Exited, Failed, Message, ProgressUpdate, Resumed, Started, Value

AttemptKind = Literal["completed", "resized", "lost", "hung", "preempted", "failed"]


@dataclass(frozen=True, slots=True)
class Work:
    """An amount of training.

    Attributes:
        batches: batches trained on, by all ranks together, so that amounts of different world sizes are comparable.
        steps: optimizer steps.
    """

    batches: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One worker group, from the start of its first worker to its end.

    Attributes:
        number: counted from 1.
        world_size: the number of workers; 0 if the group was lost before a worker started.
        nodes: the ids of the workers' nodes, by rank.
        kind: how it ended: `completed`, `resized` (Ray restarted the workers in another number), `lost` (a worker or
            its machine), `hung` (a worker), `preempted` (a machine will be taken away), `failed` (for example in your
            code).
        failure: a description; None if it completed or was resized.
        seconds: from the first worker's start to the end.
        resumed_at: the progress of the resumed checkpoint; None if it started from the beginning, or did not train.
            For several trainings, which are identified by their names, the sum over their checkpoints.
        lost: the progress that the next attempt had to repeat, as reported twice a second; None if no attempt followed,
            or none that trained. For several trainings, the sum.
    """

    number: int
    world_size: int
    nodes: tuple[str, ...]
    kind: AttemptKind
    failure: str | None
    seconds: float
    resumed_at: Work | None
    lost: Work | None


class RayValues(list[Any]):
    """The return value of `RayLauncher.run`: the value of each rank, by rank.

    Attributes:
        messages: (rank, object) for each object that was put into the ranks' queues, in order of arrival, including
            failed attempts; empty with `on_message`.
        results: the results of rank 0's trainings in the completed attempt, in order.
        attempts: all attempts; the last one completed.
        storage: the folder of the reports in Ray's storage.
    """

    def __init__(
        self,
        values: Iterable[Any],
        messages: list[tuple[int, Any]],
        results: Sequence[RunResult],
        attempts: Sequence[Attempt],
        storage: str,
    ) -> None:
        super().__init__(values)
        self.messages, self.results, self.attempts, self.storage = messages, list(results), list(attempts), storage

    @property
    def result(self) -> RunResult | None:
        """The result of the last training on rank 0; None if there was none."""
        return self.results[-1] if self.results else None


@dataclass
class WorkerGroup:
    """The state of a worker group, as received from its workers.

    Attributes:
        world_size: the number of workers.
        started: when the first one started, by the caller's clock.
        nodes: the node id of each worker, by rank.
        values: the pickled return values, by rank.
        failed: the exceptions, by rank, in order of arrival.
        exit_notices: the notices that ended it, by rank.
        results: the pickled results of its trainings.
        progress: the latest progress of each run, by name.
        resumed: the start of each run, by name.
        kind: how the group ended; None while it runs.
        failure: a description of the failure.
        ended: when it ended, by the caller's clock.
    """

    world_size: int
    started: float
    nodes: dict[int, str] = field(default_factory=dict)
    values: dict[int, bytes] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    exit_notices: dict[int, Notice] = field(default_factory=dict)
    results: list[bytes] = field(default_factory=list)
    progress: dict[str, ProgressUpdate] = field(default_factory=dict)
    resumed: dict[str, Resumed] = field(default_factory=dict)
    kind: AttemptKind | None = None
    failure: str | None = None
    ended: float = 0.0

    @property
    def has_started(self) -> bool:
        return self.world_size > 0 and len(self.nodes) == self.world_size

    @property
    def is_complete(self) -> bool:
        return self.world_size > 0 and len(self.values) == self.world_size

    @property
    def batches_done(self) -> int:
        done = {name: start.batches for name, start in self.resumed.items()}
        for name, progress in self.progress.items():
            done[name] = max(done.get(name, 0), progress.batches)
        return sum(done.values())

    def end(self, kind: AttemptKind, failure: str | None = None) -> None:
        self.kind, self.failure, self.ended = kind, failure, monotonic()


class GroupTracker:
    """Sorts the workers' messages by worker group; drops messages of groups that have ended.

    Attributes:
        groups: all groups; only the last one may still run.
    """

    def __init__(self) -> None:
        self.groups: list[WorkerGroup] = []
        self._fit = ""
        self._group_ids: list[str] = []  # of this fit

    @property
    def group(self) -> WorkerGroup | None:
        return self.groups[-1] if self.groups and self.groups[-1].kind is None else None

    @property
    def group_id(self) -> str:
        return self._group_ids[-1] if self._group_ids else ""

    def start_fit(self) -> str:
        """Return a new id, which the workers of the next call of Ray's `fit` send with their messages."""
        self._fit, self._group_ids = uuid4().hex, []
        return self._fit

    def end_fit(self, kind: AttemptKind, failure: str | None = None) -> None:
        if self.group is None:
            self.groups.append(WorkerGroup(0, monotonic()))
        self.groups[-1].end(kind, failure)
        self.start_fit()

    def record(self, envelope: Envelope) -> Message | None:
        if envelope.fit != self._fit or envelope.group_id in self._group_ids[:-1]:
            return None
        if envelope.group_id != self.group_id:
            assert isinstance(envelope.message, Started), "a worker's first message is that it has started"
            if self.group is not None:  # Ray ends all workers of a group before it starts others
                self.group.end("resized")
            self._group_ids.append(envelope.group_id)
            self.groups.append(WorkerGroup(envelope.message.world_size, monotonic()))
        _record(self.groups[-1], envelope.rank, envelope.message)
        return envelope.message


def _record(group: WorkerGroup, rank: int, message: Message) -> None:
    match message:
        case Started():
            group.nodes[rank] = message.node
        case Value():
            group.values[rank] = message.payload
        case Failed():
            group.failed[rank] = message
        case Exited():
            group.exit_notices[rank] = message.notice
        case Ended():
            group.results.append(message.result)
        case ProgressUpdate():
            group.progress[message.run] = replace(message, batches=message.batches * group.world_size)
        case Resumed():
            start = replace(message, batches=message.batches * group.world_size)
            group.resumed.setdefault(message.run, start)


def summarize_attempts(groups: Sequence[WorkerGroup]) -> list[Attempt]:
    return [_summarize(number, group, groups[number:]) for number, group in enumerate(groups, 1)]


def _summarize(number: int, group: WorkerGroup, later: Sequence[WorkerGroup]) -> Attempt:
    assert group.kind is not None
    resumed = [start for start in group.resumed.values() if start.path is not None]
    return Attempt(
        number=number,
        world_size=group.world_size,
        nodes=tuple(node for _, node in sorted(group.nodes.items())),
        kind=group.kind,
        failure=group.failure,
        seconds=group.ended - group.started,
        resumed_at=_sum((start.batches, start.steps) for start in resumed),
        lost=_lost_work(group, later),
    )


def _lost_work(group: WorkerGroup, later: Sequence[WorkerGroup]) -> Work | None:
    amounts = []
    for name, progress in group.progress.items():
        start = next((next_group.resumed[name] for next_group in later if name in next_group.resumed), None)
        if start is not None:
            amounts.append((max(0, progress.batches - start.batches), max(0, progress.steps - start.steps)))
    return _sum(amounts)


def _sum(amounts: Iterable[tuple[int, int]]) -> Work | None:
    pairs = list(amounts)
    return Work(*map(sum, zip(*pairs, strict=True))) if pairs else None
