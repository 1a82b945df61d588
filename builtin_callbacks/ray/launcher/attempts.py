"""What a call on Ray returns, and how it came to it, attempt by attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from ....core.distributed.launch.launcher import RankValues
from .mailbox import Ended, Failed, Left, Letter, Message, Pulse, Resumed, Started, Value

if TYPE_CHECKING:
    from ....core.result import RunResult
    from ..session import Notice

AttemptKind = Literal["completed", "resized", "lost", "hung", "preempted", "failed"]


@dataclass(frozen=True, slots=True)
class Work:
    """An amount of training.

    Attributes:
        batches: that were trained on, those of all ranks together: they compare where the number of ranks changes.
        steps: optimizer steps.
    """

    batches: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One group of workers: from the first that began to their end.

    Attributes:
        number: from 1.
        world_size: how many workers it had; 0 where it was lost before any began.
        nodes: the ids of the machines that they were on, by rank.
        kind: how it ended: `completed`, `resized` (its workers were ended, as Ray has more or fewer for the run now),
            `lost` (a worker, or its machine), `hung` (a worker), `preempted` (a machine was to be taken away),
            `failed` (in the user's code, say).
        failure: what happened; None where it completed or was resized.
        seconds: from the first worker's beginning to the end.
        resumed_at: what the checkpoint held that it went on from; None where it began afresh, or trained nothing. Of
            several trainings, what all their checkpoints held; they are told apart by their names.
        lost: what it had trained and the next attempt had to repeat, as far as it had told, which it does twice a
            second; None where no attempt followed, or none that trained. Of several trainings, the sum.
    """

    number: int
    world_size: int
    nodes: tuple[str, ...]
    kind: AttemptKind
    failure: str | None
    seconds: float
    resumed_at: Work | None
    lost: Work | None


class RayValues(RankValues):
    """What `RayLauncher.run` returns: the value of each rank, by rank.

    Attributes:
        messages: (rank, object) of all that was put into the ranks' queues, as it came; empty with `on_message`. Those
            of attempts that failed are among them.
        results: the results of the trainings on rank 0, in their order, of the attempt that completed.
        attempts: all attempts, the last one completed.
        storage: where Ray keeps what was reported.
    """

    def __init__(
        self,
        values: Iterable[Any],
        messages: list[tuple[int, Any]],
        results: Sequence[RunResult],
        attempts: Sequence[Attempt],
        storage: str,
    ) -> None:
        super().__init__(values, messages)
        self.results, self.attempts, self.storage = list(results), list(attempts), storage

    @property
    def result(self) -> RunResult | None:
        """The result of the last training on rank 0; None where there was none."""
        return self.results[-1] if self.results else None


@dataclass
class Group:
    """A worker group, as far as its workers have told.

    Attributes:
        world_size: how many workers it has.
        began: when the first one did, by the caller's clock.
        nodes: where each is.
        values: what the function returned, pickled.
        failed: what it raised, in the order of arrival.
        left: upon which notice it ended.
        results: of its trainings, pickled.
        pulses: where each run was, at last, by its name.
        resumed: where it began.
        kind: how it ended; None as long as it has not.
        failure: what happened.
        ended: when.
    """

    world_size: int
    began: float
    nodes: dict[int, str] = field(default_factory=dict)
    values: dict[int, bytes] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    left: dict[int, Notice] = field(default_factory=dict)
    results: list[bytes] = field(default_factory=list)
    pulses: dict[str, Pulse] = field(default_factory=dict)
    resumed: dict[str, Resumed] = field(default_factory=dict)
    kind: AttemptKind | None = None
    failure: str | None = None
    ended: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether the function has returned on every rank, and the values are here."""
        return self.world_size > 0 and len(self.values) == self.world_size

    @property
    def reach(self) -> int:
        """How many batches are done, of all runs and by all ranks together."""
        done = {name: each.batches for name, each in self.resumed.items()}
        for name, pulse in self.pulses.items():
            done[name] = max(done.get(name, 0), pulse.batches)
        return sum(done.values())

    def end(self, kind: AttemptKind, failure: str | None = None) -> None:
        """Take note of how it ended."""
        self.kind, self.failure, self.ended = kind, failure, monotonic()


class Journal:
    """What the workers tell, sorted by their groups; what comes late, of a group that is no more, is dropped.

    Attributes:
        groups: all groups, the last of them the one that lives, if any does.
    """

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._fit = ""
        self._incarnations: list[str] = []  # of this fit

    @property
    def group(self) -> Group | None:
        """The group that lives."""
        return self.groups[-1] if self.groups and self.groups[-1].kind is None else None

    @property
    def incarnation(self) -> str:
        """The name of the group that lives, for its workers; empty without one."""
        return self._incarnations[-1] if self._incarnations else ""

    def open(self) -> str:
        """Expect the workers of another one of Ray's runs; return what they have to call it."""
        self._fit, self._incarnations = uuid4().hex, []
        return self._fit

    def close(self, kind: AttemptKind, failure: str | None = None) -> None:
        """Take note of how Ray's run ended; nothing of it is heard any more."""
        if self.group is None:
            self.groups.append(Group(0, monotonic()))
        self.groups[-1].end(kind, failure)
        self.open()

    def take(self, letter: Letter) -> Message | None:
        """Take note of a letter; return what is in it, None where it comes from a group that is no more."""
        if letter.fit != self._fit or letter.incarnation in self._incarnations[:-1]:
            return None
        if letter.incarnation != self.incarnation:
            assert isinstance(letter.message, Started), "a worker says first that it has begun"
            if self.group is not None:  # Ray ends all workers of a group before it starts others
                self.group.end("resized")
            self._incarnations.append(letter.incarnation)
            self.groups.append(Group(letter.message.world_size, monotonic()))
        _enter(self.groups[-1], letter.rank, letter.message)
        return letter.message


def _enter(group: Group, rank: int, message: Message) -> None:
    match message:
        case Started():
            group.nodes[rank] = message.node
        case Value():
            group.values[rank] = message.payload
        case Failed():
            group.failed[rank] = message
        case Left():
            group.left[rank] = message.notice
        case Ended():
            group.results.append(message.result)
        case Pulse():
            group.pulses[message.run] = replace(message, batches=message.batches * group.world_size)
        case Resumed():
            begun = replace(message, batches=message.batches * group.world_size)
            group.resumed.setdefault(message.run, begun)


def attempts(groups: Sequence[Group]) -> list[Attempt]:
    """Return what became of groups that have ended."""
    return [_attempt(number, group, groups[number:]) for number, group in enumerate(groups, 1)]


def _attempt(number: int, group: Group, later: Sequence[Group]) -> Attempt:
    assert group.kind is not None
    resumed = [each for each in group.resumed.values() if each.path is not None]
    return Attempt(
        number=number,
        world_size=group.world_size,
        nodes=tuple(node for _, node in sorted(group.nodes.items())),
        kind=group.kind,
        failure=group.failure,
        seconds=group.ended - group.began,
        resumed_at=_sum((each.batches, each.steps) for each in resumed),
        lost=_lost(group, later),
    )


def _lost(group: Group, later: Sequence[Group]) -> Work | None:
    """Return what was trained here, but not kept for the next group that trained the same."""
    found = []
    for name, pulse in group.pulses.items():
        begun = next((each.resumed[name] for each in later if name in each.resumed), None)
        if begun is not None:
            found.append((max(0, pulse.batches - begun.batches), max(0, pulse.steps - begun.steps)))
    return _sum(found)


def _sum(amounts: Iterable[tuple[int, int]]) -> Work | None:
    """Return amounts of batches and steps as one; None where there are none."""
    found = list(amounts)
    return Work(*map(sum, zip(*found, strict=True))) if found else None
