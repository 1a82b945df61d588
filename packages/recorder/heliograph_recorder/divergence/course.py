"""The course of a training: its recording without the work that kills and roll-backs discarded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from heliograph.events import Request, Verb

from ..format.records import DIGESTS, Batches, Counters, DigestBlock, EventEntry, Recording, RequestEntry, walk
from ..verbs import COUNTED, LOADED, WITHIN_A_BATCH

# Verbs of requests that are not compared: they only stop, save or log, or their effect is in the counters.
UNCOMPARED: frozenset[Verb] = frozenset(
    ("stop", "save", "log", "withdraw_stop", "withdraw_save", "withdraw_log", *COUNTED)
)
COMPARED = ("epoch_start", "epoch_end", "log", "validation_end", "validation_cut", "plugin_changed")
STATES = ("save_point", "checkpoint_loaded")  # events from which a run may continue
Begin = tuple[int, int, int]
Place = tuple[int, int]  # the epoch and the batch in it, from 1


class CourseMoment(NamedTuple):
    """An item of a course.

    Attributes:
        kind: `batch`, `request`, or the name of an event.
        place: the epoch and its number of batches, including the current one.
        step: the number of optimizer steps.
        facts: must be equal; the last fact of a batch is the number of micro-batches since the last step, the first
            fact of a log is the place of the previous log.
        text: a description.
    """

    kind: str
    place: Place
    step: int
    facts: tuple[object, ...]
    text: str


@dataclass(slots=True)
class Course:
    """The course of a training.

    Attributes:
        name: for messages.
        moments: everything that affects the training, in order.
        digests: by place of the batch, in the order of `DIGESTS`; the last value is the learning rate.
        losses: by place of the batch.
        settings: options and versions, by name.
        begin: epoch, batches in it, and optimizer steps before the recording.
        end: how the last attempt ended; empty if it was killed or is running.
    """

    name: str
    moments: list[CourseMoment] = field(default_factory=list)
    digests: dict[Place, tuple[float, ...]] = field(default_factory=dict)
    losses: dict[Place, float] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    begin: Begin = 0, 0, 0
    end: str = ""


def course_of(recording: Recording, since: Begin | None = None, *, name: str = "") -> Course:
    """Return the course of a recorded training, from the save or load at `since` on."""
    trainings = [attempt for attempt in recording.attempts if attempt.phase == "train"]
    if not trainings:
        raise ValueError(f"{recording.path} has no training to compare.")
    first = trainings[0]
    limits = {"world size": first.world_size, "epochs": first.max_epochs, "steps": first.max_steps}
    settings = {**limits, **first.versions, **first.hyper_parameters}
    builder = _CourseBuilder(Course(name or str(recording.path), settings=settings), since)
    for index, entry, lost in walk(recording):
        if recording.attempts[index].phase == "train":
            builder.add(index, entry, lost=lost)
    return builder.finish()


class _CourseBuilder:
    def __init__(self, course: Course, since: Begin | None) -> None:
        self.course, self._since = course, since
        self._attempt = -1
        self._owners: dict[Place, int] = {}  # the attempt of each batch
        self._digests: dict[tuple[Place, int], tuple[float, ...]] = {}  # by place and attempt
        self._first_attempts: dict[tuple[str, Place, tuple[object, ...]], int] = {}  # of each moment
        self._last_log: Place = 0, 0

    def add(self, attempt: int, entry: object, *, lost: bool) -> None:
        self._attempt = attempt
        match entry:
            case DigestBlock():
                columns = [*(entry.columns[name] for name in DIGESTS), entry.rates]
                for batch, row in enumerate(zip(*columns, strict=True), entry.first):
                    self._digests[(entry.epoch, batch), attempt] = row
            case _ if lost:
                return
            case Batches():
                self._add_batches(entry)
            case RequestEntry():
                self._add_request(entry.request)
            case EventEntry() if not entry.data.get("ends_recording"):  # a state of the recorder, not of the training
                self._add_event(entry)

    def finish(self) -> Course:
        """Return the course, without the digests of discarded batches."""
        owners = self._owners.items()
        self.course.digests = {item[0]: self._digests[item] for item in owners if item in self._digests}
        return self.course

    def _add_batches(self, block: Batches) -> None:
        rows = zip(
            block.steps, block.skipped_steps, block.skipped_batches, block.samples, block.tokens, block.window,
            strict=True,
        )  # fmt: skip
        places = [(block.first.epoch, block.first.batch + number) for number in range(1, len(block) + 1)]
        self.course.moments += [
            CourseMoment("batch", place, facts[0], facts, "a batch") for place, facts in zip(places, rows, strict=True)
        ]
        self.course.losses |= zip(places, block.losses or (), strict=False)
        self._owners |= dict.fromkeys(places, self._attempt)

    def _add_request(self, request: Request) -> None:
        if request.verb not in UNCOMPARED:
            place = request.epoch, request.batch + (request.event in WITHIN_A_BATCH)
            facts, text = (request.what, request.by), f"{request.what} by {request.by}"
            self._append(CourseMoment("request", place, request.step, facts, text))

    def _add_event(self, entry: EventEntry) -> None:
        at, name = entry.counters, entry.event
        moment = CourseMoment(name, (at.epoch, at.batch), at.steps, *_describe(entry))
        if name == "run_closed":
            by = f" by {entry.data['by']}" if entry.data["by"] else ""
            self.course.end = f"{entry.data['status']}{by}: {entry.data['reason']}"
        if name == "checkpoint_loaded" and not self._owners:
            origin = Counters(**entry.data["origin"])
            self.course.begin = origin.epoch, origin.batch, origin.steps
        if name in STATES and (at.epoch, at.batch, at.steps) == self._since:
            self.course.begin = self._since
            self.course.moments.clear()
        if name == "log":
            moment = moment._replace(facts=(self._last_log, moment.facts))
            self._last_log = moment.place
        if name in COMPARED and not entry.data.get("resumed") and entry.data.get("by") != LOADED:
            self._append(moment)

    def _append(self, moment: CourseMoment) -> None:
        """Append a moment, unless it repeats one of an earlier attempt: a resume finishes the boundary of its save."""
        key = moment.kind, moment.place, moment.facts
        if self._first_attempts.setdefault(key, self._attempt) == self._attempt:
            self.course.moments.append(moment)


def _describe(entry: EventEntry) -> tuple[tuple[object, ...], str]:
    """Return what must be equal in an event, and a text."""
    data = entry.data
    match entry.event:
        case "validation_end" | "log":
            added = data.get("added", ())  # by plugins; they may depend on the clock
            metrics = [(name, repr(value)) for name, value in sorted(data["metrics"].items()) if name not in added]
            kind = "log" if entry.event == "log" else "validation"
            return tuple(metrics), f"a {kind} with " + ", ".join(f"{name} {value}" for name, value in metrics)
        case "plugin_changed":
            return (data["plugin"], data["change"]), f"{data['plugin']} was {data['change']}"
        case "epoch_start":
            return (data["batches"],), f"the start of an epoch of {data['batches']} batches"
    return (), f"the event {entry.event}"
