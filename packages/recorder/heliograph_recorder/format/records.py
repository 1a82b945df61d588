"""The content of a recording, as plain data.

A recording is one file about one training: the `fit` that began it, and every later attempt that resumed it. Each
attempt is a list of entries, in order: `EventEntry`, `Batches`, `RequestEntry`, `RepeatEntry`, `TimesEntry`, and
`DigestBlock`. A request that was made during an event comes after it, and names the event.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from heliograph import Request
from heliograph.events import Phase, Status

from .digests import DigestBlock

Key = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of `Progress` at one moment, as the plugins saw them.

    `seconds` is the run's clock. A recorder stops it between batches, so that a replay shows plugins the same times.
    """

    epoch: int = 0
    batch: int = 0
    earlier_batches: int = 0
    steps: int = 0
    skipped_steps: int = 0
    skipped_batches: int = 0
    samples: int = 0
    validations: int = 0
    evaluated: int = 0
    seconds: float = 0.0
    tokens: int = 0

    @property
    def batches(self) -> int:
        """Micro-batches consumed in all epochs."""
        return self.earlier_batches + self.batch


@dataclass(frozen=True, slots=True)
class EventEntry:
    """An event; those of every batch are in `Batches`.

    Attributes:
        event: its name, such as `validation_end`.
        clock: seconds since the attempt began.
        counters: of the run at that moment.
        data: the event's fields as plain data of a bounded size; paths are strings, NaN and infinity floats. Further:
            `epoch_start`: `batches`, the epoch's length or None;
            `change_served`, `log`, `validation_start`, `save_point`, `epoch_end`, `train_end`: `asked`, the numbers of
            the requests that they serve;
            `log`, `validation_end`, `test_end`, `predict_end`: `added`, the metrics that plugins have added (missing if
            there are none);
            `validation_start`, `test_start`, `predict_start`: `batches`, the number to come or None;
            `validation_end`, `validation_cut`, `test_end`, `predict_end`: `batches`, the number done by set;
            `checkpoint_loaded`: `origin`, the counters at which the run continues, and `in_boundary`, whether only
            `ShouldStop` was left of its boundary, and `planned_steps` from there, and of a fork `forked_from`, as the
            run has it; `training`, the id of the training;
            `checkpoint_saved`: `training`, too;
            `plugin_changed`: `ends_recording`, true where it was this recorder, which was switched off;
            `run_failed`: `error` (its type), `text`, `phase`, `plugin`, `event`, `batches` (the number done by set in
            the last validation or test), and of the current batch `in_hand` (whether there was one), `is_last`,
            `window` and `loss` (None if losses are not recorded);
            `run_closed`: `reason`, `by`, `rank`, `metrics`, `best`, `last`, `notes`, `warnings`.
    """

    event: str
    clock: float
    counters: Counters
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of the training.

    Attributes:
        counters: at its `BatchEnd`.
        window: how many micro-batches have added gradients since the last step.
        loss: None if losses are not recorded.
    """

    counters: Counters
    window: int
    loss: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Consecutive micro-batches; iterating yields each as a `Batch`.

    Attributes:
        first: the counters before the first of them.
        clock: seconds since the attempt began, after the last.
        steps, skipped_steps, skipped_batches, samples, window: after each batch.
        centiseconds: the run's clock after each, in hundredths of a second.
        tokens: after each, None if losses have no counts.
        losses: of each, None if losses are not recorded, or if the run was killed before they were read.
    """

    first: Counters
    clock: float
    steps: Sequence[int]
    skipped_steps: Sequence[int]
    skipped_batches: Sequence[int]
    samples: Sequence[int]
    window: Sequence[int]
    centiseconds: Sequence[int]
    losses: Sequence[float] | None = None
    tokens: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batches) and self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]  # as of any object that compares its content

    def _values(self) -> list[object]:
        values = (getattr(self, each.name) for each in fields(self))
        return [tuple(each) if isinstance(each, Sequence | array) else each for each in values]

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            loss = None if self.losses is None else self.losses[index]
            yield Batch(self.after(index), self.window[index], loss)

    @property
    def last(self) -> Counters:
        """The counters after the last of them."""
        return self.after(len(self) - 1)

    def after(self, index: int) -> Counters:
        """Return the counters after one of them, counted from 0."""
        first = self.first
        return Counters(
            first.epoch,
            first.batch + index + 1,
            first.earlier_batches,
            self.steps[index],
            self.skipped_steps[index],
            self.skipped_batches[index],
            self.samples[index],
            first.validations,
            first.evaluated,
            self.centiseconds[index] / 100,
            0 if self.tokens is None else self.tokens[index],
        )


@dataclass(frozen=True, slots=True)
class RequestEntry:
    """A request to the control; `number` counts those of the attempt from 0."""

    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class RepeatEntry:
    """A request was made repeatedly: `times` so far."""

    number: int
    times: int


def change_of(data: Mapping[str, Any]) -> Request:
    """Return the request of a change as `change_served` describes it, without the place where it was made."""
    verb, by, reason = data["verb"], data["by"], data["reason"]
    return Request(verb, by, reason, 0, 0, 0, target=data["target"], value=data["value"])


@dataclass(frozen=True, slots=True)
class HandlerTime:
    """The time of one plugin's handlers of one event, in one attempt so far.

    Attributes:
        plugin: its name, or that of a function.
        event: the event's name.
        timed: how many emissions were timed; of the events of every batch, only some.
        emissions: how many there were.
        seconds: the time in those that were timed.
        longest: the longest of them.
    """

    plugin: str
    event: str
    timed: int
    emissions: int
    seconds: float
    longest: float

    @property
    def estimate(self) -> float:
        """Seconds in all emissions; the longest counts once, since it is often a first call that sets something up."""
        if self.timed in (0, 1, self.emissions):
            return self.seconds
        return self.longest + (self.seconds - self.longest) * (self.emissions - 1) / (self.timed - 1)


@dataclass(frozen=True, slots=True)
class TimesEntry:
    """The times of all handlers, in the attempt so far; the last entry of an attempt counts."""

    rows: tuple[HandlerTime, ...]


Entry = EventEntry | Batches | RequestEntry | RepeatEntry | TimesEntry | DigestBlock
TIMED = (EventEntry, Batches)  # entries with a clock


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One call of `fit`, `validate` or `test`.

    Attributes:
        name: a random one.
        phase: of its first event.
        began: when, in UTC, ISO format.
        run: the run's name.
        world_size: how many ranks there were; the main rank recorded.
        max_epochs: its length in epochs, perhaps with a fraction; None without such a limit.
        max_steps: its length in optimizer steps, None without such a limit.
        validation_sets: their names; one empty name for a single set.
        optimizers: their names.
        hyper_parameters: those given to `fit`, as plain data of a bounded size.
        versions: of heliograph, torch and python.
        losses: whether the loss of every batch is recorded.
        plan: by event, the names of its handlers' owners, in the order in which they run.
        entries: what happened, in order.
        damage: what could not be read, in words.
        planned_steps: the optimizer steps that were planned, None where they were not known.
    """

    name: str
    phase: Phase
    began: str
    run: str
    world_size: int
    max_epochs: float | None
    max_steps: int | None
    validation_sets: tuple[str, ...]
    optimizers: tuple[str, ...]
    hyper_parameters: Mapping[str, Any]
    versions: Mapping[str, str]
    losses: bool
    plan: Mapping[str, tuple[str, ...]]
    entries: tuple[Entry, ...]
    damage: tuple[str, ...] = ()
    planned_steps: int | None = None

    @property
    def status(self) -> Status | None:
        """How it ended; None if it was killed or is still running."""
        ends = [entry for entry in self.entries if isinstance(entry, EventEntry) and entry.event == "run_closed"]
        return ends[-1].data["status"] if ends else None


@dataclass(frozen=True, slots=True)
class Recording:
    """The content of a file.

    Attributes:
        path: the file.
        attempts: the calls, in order.
    """

    path: Path
    attempts: tuple[AttemptRecord, ...]


class WalkedEntry(NamedTuple):
    """An entry of a recording.

    Attributes:
        attempt_index: its attempt, from 0.
        entry: the entry.
        lost: whether the training later continued from before it.
    """

    attempt_index: int
    entry: Entry
    lost: bool


def walk(recording: Recording) -> Iterator[WalkedEntry]:
    later = _origins(recording)  # those that follow the entry
    least = min((origin for _, _, origin in later), default=None)
    for index, attempt in enumerate(recording.attempts):
        key, is_training = (0, 0, 0, 0), attempt.phase == "train"  # an entry without counters has that of the former
        for place, entry in enumerate(attempt.entries):
            if least is None:
                yield WalkedEntry(index, entry, False)
                continue
            if later[0][:2] == (index, place):
                del later[0]
                least = min((origin for _, _, origin in later), default=None)
            if isinstance(entry, EventEntry):
                key = key_of(entry.counters)
            elif isinstance(entry, Batches):
                key = key_of(entry.last)
            if least is None or not is_training or key <= least:
                yield WalkedEntry(index, entry, False)
            else:
                parts = _parts(entry, key, [origin for _, _, origin in later])
                yield from (WalkedEntry(index, part, lost) for part, lost in parts)


def _origins(recording: Recording) -> list[tuple[int, int, Key]]:
    return [
        (index, place, origin)
        for index, attempt in enumerate(recording.attempts)
        for place, entry in enumerate(attempt.entries)
        if (origin := _origin(entry)) is not None
    ]


def _parts(entry: Entry, key: Key, origins: Sequence[Key]) -> list[tuple[Entry, bool]]:
    parts: list[tuple[Entry, bool]] = []
    for origin in origins:
        if key <= origin:
            continue
        is_within = isinstance(entry, Batches) and origin[0] == entry.first.epoch
        kept = origin[1] - entry.first.batch if isinstance(entry, Batches) and is_within else 0
        if not isinstance(entry, Batches) or kept <= 0:
            return [(entry, True), *parts]
        parts.insert(0, (slice_block(entry, kept, len(entry)), True))
        entry = slice_block(entry, 0, kept)
        key = key_of(entry.last)
    return [(entry, False), *parts]


def slice_block(block: Batches, begin: int, end: int) -> Batches:
    if (begin, end) == (0, len(block)):
        return block
    return Batches(
        block.after(begin - 1) if begin else block.first,
        block.clock - (block.centiseconds[-1] - block.centiseconds[end - 1]) / 100,
        block.steps[begin:end],
        block.skipped_steps[begin:end],
        block.skipped_batches[begin:end],
        block.samples[begin:end],
        block.window[begin:end],
        block.centiseconds[begin:end],
        None if block.losses is None else block.losses[begin:end],
        None if block.tokens is None else block.tokens[begin:end],
    )


def _origin(entry: Entry) -> Key | None:
    if not isinstance(entry, EventEntry) or entry.event != "checkpoint_loaded":
        return None
    return key_of(Counters(**entry.data["origin"]))


def key_of(counters: Counters) -> Key:
    return counters.epoch, counters.batch, counters.steps, counters.validations
