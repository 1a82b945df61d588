"""What a call on Ray returns, with a summary of each attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from .mailbox import Ended, Envelope, Exited, Failed, Message, ProgressUpdate, Resumed, Started, Value

if TYPE_CHECKING:
    from heliograph import RunResult

    from ..session import Notice

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
        world_size: the number of workers; 0 if it was lost before any started.
        nodes: the ids of the workers' nodes, by rank.
        kind: how it ended: `completed`, `resized` (its workers were ended because Ray has more or fewer for the run),
            `lost` (a worker, or its machine), `hung` (a worker), `preempted` (a machine was to be taken away),
            `failed` (for example in your code).
        failure: what happened; None if it completed or was resized.
        seconds: from the first worker's start to the end.
        resumed_at: what the checkpoint held that it resumed; None if it started from the beginning, or trained nothing.
            For several trainings, which are identified by their names, the sum over their checkpoints.
        lost: what it had trained and the next attempt had to repeat, as far as it was reported, which happens twice a
            second; None if no attempt followed, or none that trained. For several trainings, the sum.
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
    """What `RayLauncher.run` returns: the value of each rank, by rank.

    Attributes:
        messages: (rank, object) for each object that was put into the ranks' queues, in order of arrival, failed
            attempts included; empty with `on_message`.
        results: the results of rank 0's trainings in the attempt that completed, in their order.
        attempts: all attempts; the last one completed.
        storage: the folder in which Ray keeps what was reported.
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
    """A worker group, as known from its workers' messages.

    Attributes:
        world_size: the number of workers.
        started: when the first one started, by the caller's clock.
        nodes: the node id of each worker, by rank.
        values: what the function returned, pickled, by rank.
        failed: what it raised, by rank, in order of arrival.
        exit_notices: the notices on which it ended, by rank.
        results: the results of its trainings, pickled.
        progress: the last known progress of each run, by its name.
        resumed: where each run started, by its name.
        kind: how the group ended; None while it runs.
        failure: what happened.
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
        """Whether every worker has started."""
        return self.world_size > 0 and len(self.nodes) == self.world_size

    @property
    def is_complete(self) -> bool:
        """Whether the function has returned on every rank, and all values have arrived."""
        return self.world_size > 0 and len(self.values) == self.world_size

    @property
    def batches_done(self) -> int:
        """The batches trained on, of all runs and by all ranks together."""
        done = {name: each.batches for name, each in self.resumed.items()}
        for name, progress in self.progress.items():
            done[name] = max(done.get(name, 0), progress.batches)
        return sum(done.values())

    def end(self, kind: AttemptKind, failure: str | None = None) -> None:
        """Record how the group ended."""
        self.kind, self.failure, self.ended = kind, failure, monotonic()


class GroupTracker:
    """Sorts the workers' messages by worker group; drops those that arrive after their group has ended.

    Attributes:
        groups: all groups; only the last one may still run.
    """

    def __init__(self) -> None:
        self.groups: list[WorkerGroup] = []
        self._fit = ""
        self._group_ids: list[str] = []  # of this fit

    @property
    def group(self) -> WorkerGroup | None:
        """The group that runs."""
        return self.groups[-1] if self.groups and self.groups[-1].kind is None else None

    @property
    def group_id(self) -> str:
        """The id of the group that runs; empty without one."""
        return self._group_ids[-1] if self._group_ids else ""

    def start_fit(self) -> str:
        """Expect the workers of a new call of Ray's `fit`; return the id that they have to use for it."""
        self._fit, self._group_ids = uuid4().hex, []
        return self._fit

    def end_fit(self, kind: AttemptKind, failure: str | None = None) -> None:
        """Record how a call of Ray's `fit` ended; later messages of its workers are dropped."""
        if self.group is None:
            self.groups.append(WorkerGroup(0, monotonic()))
        self.groups[-1].end(kind, failure)
        self.start_fit()

    def record(self, envelope: Envelope) -> Message | None:
        """Record a message and return it; return None if its group has ended."""
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
    """Return a summary of each of the groups, all of which have ended."""
    return [_summarize(number, group, groups[number:]) for number, group in enumerate(groups, 1)]


def _summarize(number: int, group: WorkerGroup, later: Sequence[WorkerGroup]) -> Attempt:
    assert group.kind is not None
    resumed = [each for each in group.resumed.values() if each.path is not None]
    return Attempt(
        number=number,
        world_size=group.world_size,
        nodes=tuple(node for _, node in sorted(group.nodes.items())),
        kind=group.kind,
        failure=group.failure,
        seconds=group.ended - group.started,
        resumed_at=_sum((each.batches, each.steps) for each in resumed),
        lost=_lost_work(group, later),
    )


def _lost_work(group: WorkerGroup, later: Sequence[WorkerGroup]) -> Work | None:
    """Return what the group trained beyond the point where the next group resumed the same run."""
    found = []
    for name, progress in group.progress.items():
        start = next((each.resumed[name] for each in later if name in each.resumed), None)
        if start is not None:
            found.append((max(0, progress.batches - start.batches), max(0, progress.steps - start.steps)))
    return _sum(found)


def _sum(amounts: Iterable[tuple[int, int]]) -> Work | None:
    """Return the sum of (batches, steps); None if there are none."""
    found = list(amounts)
    return Work(*map(sum, zip(*found, strict=True))) if found else None
