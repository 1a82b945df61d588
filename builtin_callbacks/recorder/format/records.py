"""What a recording holds, as plain data.

A recording is one file about one training: the `fit` that began it, and every later attempt that resumed it. Each
attempt is a list of entries, in order: `EventEntry`, `Batches`, `RequestEntry`, `RepeatEntry`, `TimesEntry`. A request
that was made during an event comes after it, and names the event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....events import Request
from ....events.catalogue import Phase, Status


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of `Progress` at one moment, as the plugins saw them.

    `seconds` is the run's clock, which a recorder lets stand still from one batch to the next, so that a replay shows
    plugins the very times that they saw.
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

    @property
    def batches(self) -> int:
        """Micro-batches consumed in all."""
        return self.earlier_batches + self.batch


@dataclass(frozen=True, slots=True)
class EventEntry:
    """An event, but for those of every batch.

    Attributes:
        event: its name, such as `validation_end`.
        clock: seconds since the attempt began.
        counters: where the run was.
        data: the event's fields as plain data, cut to a bounded size, and beside them:
            `epoch_start` also `batches`, the epoch's length or None; `log`, `validation_start`, `save_point`,
            `epoch_end` and `train_end` also `asked`, the numbers of the requests that they serve; `validation_start`
            and `test_start` also `batches`, the number to come or None; `validation_end`, `validation_cut` and
            `test_end` also `batches`, those done by set; `checkpoint_loaded` also `origin`, the counters of the place,
            and `in_boundary`, whether only `ShouldStop` was left of its boundary (older ones lack it);
            `run_failed` has `error` (its type), `text`, `phase`, `plugin`, `event`, `batches`
            (those done by set in the last validation or test), and of the batch under way `in_hand` (whether there was
            one), `is_last`, `window` and `loss` (None where losses are not recorded);
            `run_closed` also `reason`, `by`, `rank`, `metrics`, `best`, `last`, `notes`. Paths are strings. A number
            that is not finite stays a float.
    """

    event: str
    clock: float
    counters: Counters
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of the training: the counters behind it, when its `BatchEnd` was told.

    Attributes:
        counters: the counters.
        window: how many micro-batches have left their gradients since the last step.
        loss: its loss, None where losses are not recorded.
    """

    counters: Counters
    window: int
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Batches:
    """Some micro-batches in a row; iterating yields each as a `Batch`.

    Attributes:
        first: the place before the first of them.
        clock: seconds since the attempt began, behind the last.
        steps, skipped_steps, skipped_batches, samples, window: behind each batch.
        centiseconds: the run's clock behind each, in hundredths of a second.
        losses: of each, None where losses are not recorded, or where a kill came before they were read.
    """

    first: Counters
    clock: float
    steps: tuple[int, ...]
    skipped_steps: tuple[int, ...]
    skipped_batches: tuple[int, ...]
    samples: tuple[int, ...]
    window: tuple[int, ...]
    centiseconds: tuple[int, ...]
    losses: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            loss = None if self.losses is None else self.losses[index]
            yield Batch(self.after(index), self.window[index], loss)

    @property
    def last(self) -> Counters:
        """The place after the last of them."""
        return self.after(len(self) - 1)

    def after(self, index: int) -> Counters:
        """Return the place after one of them, counted from 0."""
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
        )


@dataclass(frozen=True, slots=True)
class RequestEntry:
    """A request to the control; `number` counts those of the attempt from 0."""

    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class RepeatEntry:
    """A request was made again and again: `times` so far."""

    number: int
    times: int


@dataclass(frozen=True, slots=True)
class HandlerTime:
    """The time of one plugin's handlers of one event, in one attempt so far.

    Attributes:
        plugin: whose; a bare function's own name.
        event: the event's name.
        timed: how many emissions were timed.
        emissions: how many there were; of the events of every batch only some are timed.
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
        """Seconds in all emissions; the longest stands for itself, as a first call does that opens something."""
        if self.timed in (0, 1, self.emissions):
            return self.seconds
        return self.longest + (self.seconds - self.longest) * (self.emissions - 1) / (self.timed - 1)


@dataclass(frozen=True, slots=True)
class TimesEntry:
    """Where the time of handlers went, in the attempt so far; the last one of an attempt counts."""

    rows: tuple[HandlerTime, ...]


Entry = EventEntry | Batches | RequestEntry | RepeatEntry | TimesEntry
TIMED = (EventEntry, Batches)  # the kinds of entries that have a clock


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call of `fit`, `validate` or `test`.

    Attributes:
        name: a random one.
        phase: what it began as.
        began: when, in UTC, ISO format.
        run: the run's name.
        world_size: how many processes there were; the main one recorded.
        max_epochs: its length in epochs, None without such a limit.
        max_steps: its length in optimizer steps, None without such a limit.
        validation_sets: their names; one empty name for a single set.
        optimizers: their names.
        hyper_parameters: as `fit` was told, as plain data of a bounded size.
        versions: of heliograph, torch and python.
        losses: whether the loss of every batch is recorded.
        plan: the names of those who hear an event, in the order in which they run.
        entries: what came about.
        damage: what of it could not be read, in words.
    """

    name: str
    phase: Phase
    began: str
    run: str
    world_size: int
    max_epochs: int | None
    max_steps: int | None
    validation_sets: tuple[str, ...]
    optimizers: tuple[str, ...]
    hyper_parameters: Mapping[str, Any]
    versions: Mapping[str, str]
    losses: bool
    plan: Mapping[str, tuple[str, ...]]
    entries: tuple[Entry, ...]
    damage: tuple[str, ...] = ()

    @property
    def status(self) -> Status | None:
        """How it ended; None where it was killed, or goes on."""
        ends = [entry for entry in self.entries if isinstance(entry, EventEntry) and entry.event == "run_closed"]
        return ends[-1].data["status"] if ends else None


@dataclass(frozen=True, slots=True)
class Recording:
    """What a file holds.

    Attributes:
        path: the file.
        attempts: the calls, in order.
    """

    path: Path
    attempts: tuple[Attempt, ...]
