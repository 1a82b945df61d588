"""The content of a recording as plain data.

A recording is one file about one training: the `fit` that began it, and every attempt that resumed it. An attempt is a
list of entries in order: `EventEntry`, `Batches`, `RequestEntry`, `RepeatEntry`, `TimesEntry` and `DigestBlock`. A
request made during an event follows the event and names it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from heliograph.events import Phase, Request, Status

Key = tuple[int, int, int, int]
DIGESTS = ("batch", "draws", "options", "loss", "gradients", "weights")
COLUMNS = ("centiseconds", "steps", "skipped_steps", "skipped_batches", "samples", "window", "tokens")


@dataclass(frozen=True, slots=True)
class Counters:
    """Hold the counters of `Progress` at one moment, as the plugins saw them.

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
        """Number of micro-batches consumed in all epochs."""
        return self.earlier_batches + self.batch


@dataclass(frozen=True, slots=True)
class EventEntry:
    """Record an event; the events of every batch are in `Batches`.

    Attributes:
        event: the event's name, such as `validation_end`.
        clock: seconds since the attempt began.
        counters: the run's counters at that moment.
        data: the event's fields as plain data of a bounded size; paths are strings, NaN and infinity are floats. Some
            events have more data:
            `epoch_start`: `batches`, the epoch's length or None;
            `change_served`, `log`, `validation_start`, `save_point`, `epoch_end`, `train_end`: `asked`, the numbers of
            the requests that they serve;
            `log`, `validation_end`, `test_end`, `predict_end`: `added`, the metrics added by plugins (missing if there
            are none);
            `validation_start`, `test_start`, `predict_start`: `batches`, the number of batches or None;
            `validation_end`, `validation_cut`, `test_end`, `predict_end`: `batches`, the number of batches done by set;
            `checkpoint_loaded`: `origin`, the counters at which the run continues; `in_boundary`, true if only
            `ShouldStop` remained of its boundary; `planned_steps`; `training`, the id of the training; and for a fork
            `forked_from`;
            `checkpoint_saved`: `training`;
            `plugin_changed`: `ends_recording`, true if this recorder was switched off;
            `run_failed`: `error` (its type), `text`, `phase`, `plugin`, `event`;
            `run_closed`: `reason`, `by`, `rank`, `metrics`, `best`, `last`, `notes`, `warnings`.
    """

    event: str
    clock: float
    counters: Counters
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """Describe one micro-batch of the training.

    Attributes:
        counters: the counters at its `BatchEnd`.
        window: the number of micro-batches in the current accumulation window; 0 after a step.
        loss: the loss, None if losses are not recorded.
    """

    counters: Counters
    window: int
    loss: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Hold consecutive micro-batches as columns; iterating yields `Batch` objects.

    Attributes:
        first: the counters before the first batch.
        clock: seconds since the attempt began, after the last batch.
        centiseconds: the run's clock after each batch, in hundredths of a second.
        steps, skipped_steps, skipped_batches, samples, window, tokens: the values after each batch.
        losses: the loss of each batch, None if losses are not recorded, or if the run was killed before they were read.
    """

    first: Counters
    clock: float
    centiseconds: Sequence[int]
    steps: Sequence[int]
    skipped_steps: Sequence[int]
    skipped_batches: Sequence[int]
    samples: Sequence[int]
    window: Sequence[int]
    tokens: Sequence[int]
    losses: Sequence[float] | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batches) and self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]  # __eq__ compares the content

    def _values(self) -> list[object]:
        values = (getattr(self, field.name) for field in fields(self))  # a column may be a tuple, a range or an array
        return [tuple(value) if isinstance(value, Sequence | array) else value for value in values]

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            loss = None if self.losses is None else self.losses[index]
            yield Batch(self.after(index), self.window[index], loss)

    @property
    def last(self) -> Counters:
        """The counters after the last batch."""
        return self.after(len(self) - 1)

    def after(self, index: int) -> Counters:
        """Return the counters after the batch at `index`, from 0."""
        first = self.first
        return Counters(
            first.epoch, first.batch + index + 1, first.earlier_batches, self.steps[index], self.skipped_steps[index],
            self.skipped_batches[index], self.samples[index], first.validations, first.evaluated,
            self.centiseconds[index] / 100, self.tokens[index],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RequestEntry:
    """Record a request to the control; `number` counts the requests of the attempt from 0."""

    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class RepeatEntry:
    """Record that a request was repeated: `times` so far."""

    number: int
    times: int


def change_of(data: Mapping[str, Any]) -> Request:
    """Return the request of a `change_served` event, without its position."""
    verb, by, reason = data["verb"], data["by"], data["reason"]
    return Request(verb, by, reason, 0, 0, 0, target=data["target"], value=data["value"])


@dataclass(frozen=True, slots=True)
class HandlerTime:
    """Hold the time of one plugin's handlers of one event, in one attempt so far.

    Attributes:
        plugin: the name of the plugin, or of a function.
        event: the event's name.
        timed: the number of timed emissions; the events of every batch are sampled.
        emissions: the number of all emissions.
        seconds: the total of the timed emissions.
        longest: the longest timed emission.
    """

    plugin: str
    event: str
    timed: int
    emissions: int
    seconds: float
    longest: float

    @property
    def estimate(self) -> float:
        """Estimated seconds in all emissions; the longest is not scaled, since it is often a first call."""
        if self.timed in (0, 1, self.emissions):
            return self.seconds
        return self.longest + (self.seconds - self.longest) * (self.emissions - 1) / (self.timed - 1)


@dataclass(frozen=True, slots=True)
class TimesEntry:
    """Hold the times of all handlers in the attempt so far; the last entry of an attempt is the total."""

    rows: tuple[HandlerTime, ...]


@dataclass(frozen=True, slots=True)
class DigestBlock:
    """The digests of consecutive batches of an epoch, of 32 bits; a digest that was not taken is 0.

    Attributes:
        epoch: the epoch of the batches.
        first: the number of the first batch within the epoch, from 1.
        columns: the digests by batch: its content as loaded (`batch`); the random generators after it (`draws`); the
            options of the optimizers at their step (`options`); the `loss`; the norms of the `gradients`; the
            `weights` after it.
        rates: the learning rate of the first optimizer by batch, NaN if it is a tensor.
    """

    epoch: int
    first: int
    columns: Mapping[str, Sequence[int]]
    rates: Sequence[float]

    def __len__(self) -> int:
        return len(self.rates)


Entry = EventEntry | Batches | RequestEntry | RepeatEntry | TimesEntry | DigestBlock
TIMED = (EventEntry, Batches)  # entries with a clock


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """Record one call of `fit`, `validate` or `test`.

    Attributes:
        name: a random name.
        phase: the phase of its first event.
        began: when it began, in UTC, ISO format.
        run: the run's name.
        world_size: the number of ranks; the main rank recorded.
        max_epochs: the length in epochs, possibly with a fraction; None without such a limit.
        max_steps: the length in optimizer steps, None without such a limit.
        validation_sets: the names of the validation sets; one empty name for a single set.
        optimizers: the names of the optimizers.
        hyper_parameters: the hyper-parameters passed to `fit`, as plain data of a bounded size.
        versions: the versions of heliograph, torch and python.
        losses: whether the loss of every batch is recorded.
        plan: the owners of the handlers by event, in the order in which they run.
        entries: the entries in order.
        damage: descriptions of unreadable lines.
        has_gap: whether entries follow an unreadable line, so that entries are missing between others.
        planned_steps: the number of planned optimizer steps, None if unknown.
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
    has_gap: bool = False
    planned_steps: int | None = None

    @property
    def status(self) -> Status | None:
        """The status at the end; None if the run was killed or is still running."""
        ends = [entry for entry in self.entries if isinstance(entry, EventEntry) and entry.event == "run_closed"]
        return ends[-1].data["status"] if ends else None


@dataclass(frozen=True, slots=True)
class Recording:
    """Hold the content of a recording.

    Attributes:
        path: the file.
        attempts: the calls in order.
    """

    path: Path
    attempts: tuple[AttemptRecord, ...]


class WalkedEntry(NamedTuple):
    """An entry with the index of its attempt. It is lost if the training later continued from before it."""

    attempt_index: int
    entry: Entry
    lost: bool


def walk(recording: Recording) -> Iterator[WalkedEntry]:
    """Yield every entry in order; a block that is partly lost is split."""
    later = [  # the positions from which the training continues after the current entry
        (index, place, key_of(Counters(**entry.data["origin"])))
        for index, attempt in enumerate(recording.attempts)
        for place, entry in enumerate(attempt.entries)
        if isinstance(entry, EventEntry) and entry.event == "checkpoint_loaded"
    ]
    least = min((origin for _, _, origin in later), default=None)
    for index, attempt in enumerate(recording.attempts):
        key, is_training = (0, 0, 0, 0), attempt.phase == "train"  # an entry without counters has the previous key
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
                parts = _split_at(entry, key, [origin for _, _, origin in later])
                yield from (WalkedEntry(index, part, lost) for part, lost in parts)


def _split_at(entry: Entry, key: Key, origins: Sequence[Key]) -> list[tuple[Entry, bool]]:
    """Split an entry at the positions where the training continued; return the parts, and whether each is lost."""
    parts: list[tuple[Entry, bool]] = []
    for origin in origins:
        if key <= origin:
            continue
        is_within = isinstance(entry, Batches) and origin[0] == entry.first.epoch
        until = origin[1] - entry.first.batch if isinstance(entry, Batches) and is_within else 0
        if not isinstance(entry, Batches) or until <= 0:
            return [(entry, True), *parts]
        parts.insert(0, (slice_block(entry, until, len(entry)), True))
        entry = slice_block(entry, 0, until)
        key = key_of(entry.last)
    return [(entry, False), *parts]


def slice_block(block: Batches, begin: int, end: int) -> Batches:
    if (begin, end) == (0, len(block)):
        return block
    first = block.after(begin - 1) if begin else block.first
    clock = block.clock - (block.centiseconds[-1] - block.centiseconds[end - 1]) / 100
    columns: dict[str, Any] = {name: getattr(block, name)[begin:end] for name in COLUMNS}
    return Batches(first, clock, **columns, losses=None if block.losses is None else block.losses[begin:end])


def key_of(counters: Counters) -> Key:
    """Return the sort key of a position in a training."""
    return counters.epoch, counters.batch, counters.steps, counters.validations
