"""What every tracker does: it listens, and writes in a thread of its own."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple, dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Condition, Thread
from time import monotonic, perf_counter
from typing import Any, Final
from uuid import uuid4

from ...events import Event, Lane, Progress, Run
from ...events import catalogue as ev
from ...events.errors import describe_error
from ...events.payloads import LogCurve, LogFile, LogHistogram, LogImage, LogText
from ...plugins import Plugin, on

SAVED = ("scalars", "text", "hyper_parameters")  # the kinds that a checkpoint holds where they are not written yet


@dataclass(frozen=True, slots=True)
class Page:
    """Where a run is shown.

    Attributes:
        name: the run's name.
        training_id: of which training the run is a part: the same in all its attempts.
        id: the page to continue, as `open` returned it; None for a new one.
        attempt: how many runs the page will have seen with this one: 1, and one more at each resume.
        resumed_at: the optimizer step at which the training was resumed; None where it begins, and outside of one.
    """

    name: str
    training_id: str
    id: str | None
    attempt: int
    resumed_at: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run was when something was logged.

    Attributes:
        step: optimizer steps.
        epoch: epochs that are done, such as 1.25; finished ones where the loader has no length.
        samples: training samples.
        seconds: seconds since the training began, those of former attempts included.
        attempt: that of the page.
        rollbacks: how often the training has gone back to an earlier state so far: the same steps come again.
    """

    step: int
    epoch: float
    samples: int
    seconds: float
    attempt: int
    rollbacks: int


@dataclass(frozen=True, slots=True)
class Record:
    """One thing to write.

    Attributes:
        kind: the method `write_<kind>` of the tracker; or `open`, `roll_back` or `finish`.
        arguments: what to call it with.
        size: the bytes of its arrays and texts.
    """

    kind: str
    arguments: tuple[Any, ...]
    size: int = 0

    @property
    def values(self) -> int:
        """How many values it brings to a page: the metrics of a row, and where it is."""
        return 1 + len(self.arguments[1]) if self.kind == "scalars" else 1

    def as_plain(self) -> list[Any]:
        """Return it as lists, dicts, numbers and strings."""
        return [self.kind, *(list(astuple(each)) if isinstance(each, Place) else each for each in self.arguments)]


def record_of(plain: list[Any]) -> Record:
    """Return the record that `as_plain` described."""
    kind, *arguments = plain
    return Record(kind, tuple(Place(*each) if isinstance(each, list) else each for each in arguments))


AXES: Final = tuple(field.name for field in fields(Place))
TAKEN: Final = frozenset((*AXES, "training"))  # beside what was logged, on one page or another


def free_name(kind: str, name: str) -> str:
    """Return the name to show something under: `metric/epoch` for a metric `epoch`, which a place has beside it."""
    return f"{kind}/{name}" if name in TAKEN else name


MEMORY: Final = 256 * 2**20  # bytes that wait at most
ALWAYS: Final = ("open", "roll_back", "finish")  # what is never dropped
BATCH: Final = 1000  # values that are collected at most before they are flushed
ROWS: Final = ("scalars", "text")  # what is kept until it is safe; hyper-parameters are written again with each page
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between two attempts to write the same
DRAIN_PATIENCE: Final = 1.0  # seconds; a save holds up the training

logger = logging.getLogger("heliograph")


class Outbox:
    """Writes records in their order, in a daemon thread that begins with the first of them.

    Args:
        name: whose it is, for messages.
        write: writes one record, or collects it for `flush`; called in the thread.
        outages: errors after which the same is tried again, after a pause that grows.
        capacity: how many records may wait; later ones are dropped.
        patience: seconds without progress after which `close` drops what still waits.
        settles: seconds after which what was written is safe where the process is killed.
        collects: kinds of records that `write` collects; they stay in the queue until `flush` has written them.
        flush: writes what was collected.
        former: the thread of the outbox before, which may still be in a request; this one's waits for its end.

    Attributes:
        opened: what `write` returned for `open`.
        refused: the error by which no page could be opened: nothing is written then.
        lost: how many records were not written: for each reason, by kind.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Record], Any],
        *,
        outages: tuple[type[Exception], ...],
        capacity: int,
        patience: float,
        settles: float = 0.0,
        collects: Collection[str] = (),
        flush: Callable[[], None] = lambda: None,
        former: Thread | None = None,
    ) -> None:
        self._name, self._write, self._outages, self._former = name, write, outages, former
        self._capacity, self._patience = capacity, patience
        self._collects, self._flush = collects, flush
        self._queue: deque[Record] = deque()
        self._collected = self._values = 0  # the first of the queue, and what they bring: not flushed yet
        self._suspects = 0  # the first of the queue: of a batch that was refused
        self._settles, self._settling = settles, deque[tuple[float, Record]]()  # when each was written
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_closing = False
        self._bytes = self._written = 0
        self._outage = self._refusal = self._given_up = ""  # the error that lasts, the first refusal, the reason
        self.opened: Any = None
        self.refused = ""
        self.lost: dict[str, Counter[str]] = {}

    def put(self, record: Record) -> None:
        """Add a record, or drop it where too many wait."""
        with self._changed:
            if self._given_up:
                self._lose(record, self._given_up)
                return
            is_full = len(self._queue) >= self._capacity or self._bytes + record.size > MEMORY
            if is_full and record.kind not in ALWAYS:
                self._lose(record, f"more than {self._capacity} records, or {MEMORY // 2**20} MB, waited")
                return
            self._queue.append(record)
            self._bytes += record.size
            if self._thread is None:
                self._thread = Thread(target=self._run, name=f"heliograph-{self._name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def waiting(self) -> list[Record]:
        """Return what is not written yet, the one that is being written included, or not safe yet."""
        with self._changed:
            self._settle()
            return [*(record for _, record in self._settling), *self._queue]

    def drain(self) -> None:
        """Wait until everything is written; not in an outage, nor longer than a second without progress."""
        with self._changed:
            while self._queue and not self._outage and self._waits_for_progress(DRAIN_PATIENCE):
                pass

    def close(self) -> Thread | None:
        """Wait until everything is written, or nothing is any more, and drop the rest.

        Returns:
            The thread, where it does not return from what it is writing.
        """
        with self._changed:
            if self._thread is None:
                return None
            self._is_closing = True
            self._changed.notify_all()
            while self._queue and self._waits_for_progress(self._patience, through_outages=True):
                pass
            is_done = not self._queue
            if not is_done:
                self._give_up(self._outage or f"nothing was written for {self._patience:g} seconds")
        if is_done:
            self._thread.join()
        return None if is_done else self._thread

    def _waits_for_progress(self, patience: float, through_outages: bool = False) -> bool:
        """Wait until a record is written, or an outage begins; return whether something was written in time."""
        before = self._written
        self._changed.wait_for(
            lambda: not self._queue or self._written > before or (bool(self._outage) and not through_outages), patience
        )
        return self._written > before

    def _settle(self) -> None:
        while self._settling and self._settling[0][0] < monotonic() - self._settles:
            self._settling.popleft()

    # In the thread.

    def _run(self) -> None:
        if self._former is not None:
            self._former.join()
        pause = FIRST_PAUSE
        try:
            while (work := self._next()) is not None:
                try:
                    work()
                except self._outages as error:
                    pause = self._wait(describe_error(error), pause)
                else:
                    pause = FIRST_PAUSE
                    if self._outage:
                        with self._changed:
                            self._outage = ""
                        logger.info("%s is written to again", self._name)
        except BaseException as error:
            with self._changed:
                self._give_up(describe_error(error))
            raise

    def _next(self) -> Callable[[], None] | None:
        """Wait until there is something to do, and return it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            count = self._collected
            record = self._queue[count] if len(self._queue) > count else None
            if count > 0 and not (record is not None and self._joins(record)):
                return partial(self._write_collected, list(islice(self._queue, count)))
            return None if record is None else partial(self._write_record, record)

    def _joins(self, record: Record) -> bool:
        """Return whether a record may be collected with those before it."""
        fits = self._values + record.values <= BATCH
        return fits and record.kind in self._collects and not self._suspects and not self._outage

    def _write_record(self, record: Record) -> None:
        is_collected = False
        try:
            if not self.refused:
                result = self._write(record)
                is_collected = record.kind in self._collects
                if record.kind == "open":
                    self.opened = result
        except self._outages:
            raise
        except Exception as error:  # noqa: BLE001  # counted, logged, and said in the result
            self._note_refusal(record, describe_error(error))
        if is_collected:
            with self._changed:
                if not self._given_up:
                    self._collected += 1
                    self._values += record.values
                    self._written += 1
                    self._changed.notify_all()
        else:
            self._remove(record, self._collected)

    def _write_collected(self, records: list[Record]) -> None:
        """Flush; the records of a batch that is refused are written again one by one, so only bad ones are lost."""
        try:
            self._flush()
        except self._outages:
            raise
        except Exception as error:  # noqa: BLE001  # counted, logged, and said in the result
            if len(records) > 1:
                self._suspects = len(records)
                self._forget_collected()
                return
            self._note_refusal(records[0], describe_error(error))
        for record in records:
            self._remove(record, 0)
        self._forget_collected()

    def _forget_collected(self) -> None:
        with self._changed:
            self._collected = self._values = 0
            self._written += 1
            self._changed.notify_all()

    def _remove(self, record: Record, index: int) -> None:
        with self._changed:
            if self._given_up:  # dropped while it was written
                return
            del self._queue[index]
            self._bytes -= record.size
            self._suspects = max(0, self._suspects - 1)
            self._written += 1
            if self.refused and record.kind != "open":
                self._lose(record, self.refused)
            elif self._settles and record.kind in ROWS:
                self._settling.append((monotonic(), record))
                self._settle()
            self._changed.notify_all()

    def _wait(self, error: str, pause: float) -> float:
        """Wait before the next attempt; return the pause after that."""
        if not self._outage:
            logger.warning("%s cannot be written to: its records wait, the training continues (%s)", self._name, error)
        with self._changed:
            self._outage, was_closing = error, self._is_closing
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._given_up or self._is_closing is not was_closing, pause)
        return FIRST_PAUSE if self._is_closing else min(2 * pause, LONGEST_PAUSE)

    # What was lost.

    def _note_refusal(self, record: Record, error: str) -> None:
        with self._changed:
            if self._given_up:  # counted already
                return
            is_first, self._refusal = not self._refusal, self._refusal or error
            if record.kind == "open":
                self.refused = error
            self._lose(record, self._refusal)
        if is_first:
            logger.warning("%s did not write a record (%s): %s", self._name, record.kind, error)

    def _give_up(self, reason: str) -> None:
        """Drop what waits; with the lock."""
        if not self._given_up:
            self._given_up = reason
            for record in self._queue:
                self._lose(record, reason)
            self._queue.clear()
            self._collected = self._values = 0
            self._changed.notify_all()

    def _lose(self, record: Record, reason: str) -> None:
        self.lost.setdefault(reason, Counter())[record.kind] += 1


KINDS: Final = {LogImage: "image", LogText: "text", LogHistogram: "histogram", LogCurve: "curve", LogFile: "file"}
UNSAVED: Final = {*KINDS.values()} - {*SAVED}
WRITTEN: Final = {"scalars", "hyper_parameters", *KINDS.values()}
NAMES: Final = {
    "open": "the page",
    "scalars": "rows of metrics",
    "hyper_parameters": "the hyper-parameters",
    **{kind: f"{kind}s" for kind in KINDS.values()},
    "roll_back": "a note of a roll back",
    "finish": "the ending",
}
UNITS = ("samples", "steps", "tokens")


class Tracker(Plugin):
    """Show a run on a page of its own: metrics, images, texts, histograms, curves, files and hyper-parameters.

    The base of all trackers. Write a subclass for another: `open`, `finish`, and the `write_...` methods for what it
    can show. All of these are called in one thread of the tracker, in the order in which things were logged, so the
    training never waits for them. Records wait while there is an outage; those that were not written when the run has
    ended are counted in a warning of its result. A resumed run continues the page that its checkpoint names: what the
    checkpoint had waiting is written first, and what the page holds already is left out. A metric that is named as a
    field of `Place`, or `training`, is shown as `metric/epoch`.

    Attributes:
        outages: errors after which the same record is written again, with pauses that grow up to 5 seconds; any other
            error loses its record.
        capacity: how many records may wait.
        patience: at the end of a run, seconds without progress after which the rest is dropped.
        settles: seconds after which what was written outlives a killed process; until then a checkpoint has it, too,
            and a resumed run writes it again where the page does not hold it.
        collects: kinds of records, such as `scalars`, that are collected by their method and written by `flush`.
        shares_rows: whether images, texts and the like are in one row with the fields of `Place`: what is named as one
            of these is shown as `image/epoch` and so on.
        is_local: whether it writes files of this machine: a checkpoint waits until everything is written, but not in
            an outage, nor longer than a second without progress; it has what waits then, as with any other tracker.
    """

    policy = "observer"
    draws = False
    ranks = "main"
    rehearses = False
    outages: tuple[type[Exception], ...] = (OSError,)
    capacity: int = 10_000
    patience: float = 10.0
    settles: float = 0.0
    collects: tuple[str, ...] = ()
    shares_rows: bool = False
    is_local: bool = False

    def __init__(self) -> None:
        if (type(self).flush is Tracker.flush) is not (not self.collects) or not WRITTEN.issuperset(self.collects):
            kinds = f"kinds of {', '.join(sorted(WRITTEN))}"
            raise TypeError(
                f"{type(self).__name__}: collects = {self.collects!r}, and flush: give both, {kinds}, or none."
            )
        self._outbox: Outbox | None = None
        self._former: Thread | None = None  # of a run before, which did not return from a request
        self._rates = Rates()
        self._page_id: str | None = None
        self._attempt, self._rollbacks = 1, 0
        self._resumed_at: int | None = None
        self._waiting: list[Record] = []  # of the checkpoint
        self._left_out: Mapping[str, int] = {}  # how many waited and are not in the checkpoint, by kind
        self._held: Mapping[str, int] = {}  # what the page shows beyond the checkpoint: the last step of each name
        self._held_rollbacks = 0
        self._status: str | None = None  # how the training ended that the page shows
        self._trains = self._has_ended = False  # the latter from `RunClosed` until the next run begins
        self._unknown: Counter[str] = Counter()
        self._remarks: list[str] = []

    # What a subclass writes.

    def prepare(self, run: Run) -> None:
        """At `TrainStart`, in the loop's thread: look whether there can be a page, which needs a key or a folder."""

    @abstractmethod
    def open(self, page: Page) -> str:
        """Begin a page, or continue the one that `page.id` names; return its id, which the checkpoints hold.

        A checkpoint that was saved before the page was open names none: where `page.resumed_at` is not None, continue
        a page of the same `page.training_id`, if there is one.
        """

    def last_steps(self) -> Mapping[str, int]:
        """Return, of a page that a resumed run continues, the step that each metric was last written at.

        A killed run may have written beyond its checkpoint. What is repeated up to there is left out. Empty where the
        page is cut back to the checkpoint instead, or is new.
        """
        return {}

    def holds(self, place: Place, name: str) -> bool:
        """Return whether a page that is continued shows this already, by `last_steps`; such a record is left out."""
        return place.step <= self._held.get(name, -1) and place.rollbacks <= self._held_rollbacks

    @abstractmethod
    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        """Write metrics; they may be infinite or NaN."""

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        """Write the run's hyper-parameters: numbers, flags and strings. Called when a page is opened, or continued."""

    def write_image(self, place: Place, name: str, image: Any) -> None:
        """Write an image: bytes of shape (height, width, 3)."""

    def write_text(self, place: Place, name: str, text: str) -> None:
        """Write a text."""

    def write_histogram(self, place: Place, name: str, values: Any) -> None:
        """Write the distribution of an array of one dimension."""

    def write_curve(self, place: Place, name: str, labels: Any, scores: Any) -> None:
        """Write a precision-recall curve, from arrays of flags and of scores."""

    def write_file(self, place: Place, name: str, path: Path) -> None:
        """Keep a file."""

    def flush(self) -> None:
        """Write what was collected of the kinds in `collects`.

        Called before the values would be more than 1,000, where no such record comes next, and when none waits. The
        records count as written when this has succeeded. It may fail as the methods above: after an outage it is called
        again and must find the same; after another error it must find nothing, since each of the records is written
        again, with a `flush` of its own.
        """

    def roll_back(self, place: Place) -> None:
        """Continue at an earlier step, `place.step`: the steps after it come again, and differ."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """Write how the run ended, and close the page.

        Args:
            status: `completed`, `stopped`, `preempted` (stopped since its machine is needed), `interrupted` or
                `failed`; after an evaluation on the page of a training, that of the training.
        """

    # What it listens to.

    def reset(self) -> None:
        """Forget the former training: the new one has a page of its own."""
        self._page_id, self._attempt, self._rollbacks, self._waiting = None, 1, 0, []
        self._rates, self._resumed_at, self._status, self._left_out = Rates(), None, None, {}

    @on(ev.TrainStart)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Look whether there can be a page."""
        self._trains = True
        self.prepare(run)

    @on(ev.CheckpointLoaded)
    def note_load(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Note where the run continues, or goes back to; measure the throughput again from here."""
        self._rates = Rates()
        if self._outbox is None:
            self._resumed_at = run.origin.steps
        else:
            self._rollbacks += 1
            self._put(run, "roll_back", self._place(run))

    @on(ev.EpochStart)
    def begin_epoch(self, run: Run, event: ev.EpochStart) -> None:
        """Open the page before the first epoch."""
        self._ready(run)

    @on(ev.Log, lane=Lane.MEASURE, optional=True)
    def measure(self, run: Run, event: ev.Log) -> None:
        """Add the throughput and the learning rate; in a replay, what the run measured is in the log already."""
        if run.report.is_replay:
            return
        for name, rate in self._rates.read(run.progress, perf_counter()).items():
            if name != "steps_per_second":
                event.metrics.setdefault(f"train/{name}", rate)
        for name, optimizer in run.optimizers.items():
            rate = float(optimizer.param_groups[0]["lr"])
            event.metrics.setdefault(f"train/{run.stepping.label('learning_rate', name)}", rate)

    @on(ev.Log, ev.ValidationEnd, ev.TestEnd, ev.PredictEnd, lane=Lane.REPORT)
    def write_metrics(self, run: Run, event: ev.Log | ev.ValidationEnd | ev.TestEnd | ev.PredictEnd) -> None:
        """Write metrics at the current step."""
        if event.metrics:
            values = {free_name("metric", name): float(value) for name, value in event.metrics.items()}
            self._put(run, "scalars", self._place(run), values)

    @on(LogImage, LogText, LogHistogram, LogCurve, lane=Lane.REPORT, optional=True)
    def write_payload(self, run: Run, event: LogImage | LogText | LogHistogram | LogCurve) -> None:
        """Write what was logged besides numbers, or count what cannot be shown here."""
        self._put_payload(run, event)

    @on(LogFile, lane=Lane.REPORT, optional=True)
    def keep_file(self, run: Run, event: LogFile) -> None:
        """Keep a file, or count those that cannot be kept here."""
        self._put_payload(run, event)

    @on(ev.RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: ev.RunClosed) -> None:
        """Write how the run ended, wait until everything is written, and say what is missing."""
        asked = run.control.stop_request
        leaves = event.status == "stopped" and asked is not None and asked.required
        status = "preempted" if leaves else event.status
        if self._trains:
            self._status, self._trains = status, False
        if self._outbox is not None or self._resumed_at is not None:
            self._finish(run, self._ready(run), self._status or status)
        self._has_ended = True

    def _finish(self, run: Run, outbox: Outbox, status: str) -> None:
        self._close(status)
        if outbox.refused:
            run.warn(f"{self.name} shows nothing of this run, since it could not open a page: {_ended(outbox.refused)}")
        else:
            for reason, lost in outbox.lost.items():
                what = ", ".join(f"{NAMES[kind]} ({count})" for kind, count in lost.items())
                run.warn(f"{self.name} lost {what}: {_ended(reason)}")
        for kind, count in self._unknown.items():
            run.note(f"{self.name} cannot show what was logged as {kind} ({count} times)")
        for text in self._remarks:
            run.note(text)
        self._unknown.clear()
        self._remarks.clear()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return which page this is, and what is not written on it yet."""
        if self._outbox is not None and self.is_local:
            self._outbox.drain()
        waiting = self._waiting if self._outbox is None else self._outbox.waiting()
        return {
            "page": (self._outbox and self._outbox.opened) or self._page_id,
            "attempt": self._attempt,
            "rollbacks": self._rollbacks,
            "waiting": [each.as_plain() for each in waiting if each.kind in SAVED],
            "left_out": dict(Counter(each.kind for each in waiting if each.kind in UNSAVED)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the page; where the run goes back, the page is the same one and knows it."""
        if self._outbox is None and state:
            self._page_id, self._attempt = state["page"], state["attempt"]
            self._rollbacks, self._waiting = state["rollbacks"], [record_of(each) for each in state["waiting"]]
            self._left_out = state["left_out"]

    def close(self) -> None:
        """Close the page; where this was switched off in mid-run, as stopped."""
        self._close(self._status or "stopped")
        self._has_ended = False

    # The records.

    def _writes(self, kind: str) -> bool:
        return getattr(type(self), f"write_{kind}") is not getattr(Tracker, f"write_{kind}")

    def _place(self, run: Run) -> Place:
        progress = run.progress
        fraction = run.length.epoch_fraction
        epoch = float(progress.epoch) if fraction is None else round(fraction, 6)
        seconds = progress.seconds
        return Place(progress.steps, epoch, progress.samples, seconds, self._attempt, self._rollbacks)

    def _put_payload(self, run: Run, event: Event) -> None:
        kind = KINDS[type(event)]
        if not self._writes(kind):
            self._unknown[kind] += 1
            return
        title, *values = vars(event).values()
        self._put(run, kind, self._place(run), free_name(kind, title) if self.shares_rows else title, *values)

    def _put(self, run: Run, kind: str, *arguments: Any) -> None:
        if self._has_ended:
            run.warn(f"{self.name} lost {NAMES.get(kind, kind)} that came after the ending of its page.")
            return
        size = sum(len(each) if isinstance(each, str) else getattr(each, "nbytes", 0) for each in arguments)
        self._ready(run).put(Record(kind, arguments, size))

    def _ready(self, run: Run) -> Outbox:
        """Return the queue, with the page that it begins with."""
        if self._outbox is None:
            self._outbox = Outbox(
                self.name,
                self._write,
                outages=self.outages,
                capacity=self.capacity,
                patience=self.patience,
                settles=self.settles,
                collects=self.collects,
                flush=self.flush,
                former=self._former,
            )
            resumed_at, self._resumed_at = self._resumed_at, None
            self._attempt += resumed_at is not None
            self._held_rollbacks, self._held = self._rollbacks, {}
            training_id = uuid4().hex if run.report.is_replay else run.checkpoints.training_id
            page = Page(run.name, training_id, self._page_id, self._attempt, resumed_at)
            self._outbox.put(Record("open", (page,)))
            what = ", ".join(f"{kind} ({count})" for kind, count in self._left_out.items())
            self._left_out = {}
            if what:
                self._remark(f"{self.name} may lack what waited to be written when the checkpoint was saved: {what}")
            waiting, self._waiting = self._waiting, []
            for record in waiting:
                self._outbox.put(record)
            if run.hyper_parameters and self._writes("hyper_parameters"):  # after those of a former attempt
                items = run.hyper_parameters.items()
                plain = {str(key): each if isinstance(each, int | float | str) else str(each) for key, each in items}
                self._outbox.put(Record("hyper_parameters", (plain,)))
        return self._outbox

    def _remark(self, text: str) -> None:
        """Note it in the result; from the thread, too."""
        if text not in self._remarks:
            self._remarks.append(text)

    def _write(self, record: Record) -> str | None:
        """Write a record; return the id of a page that was opened. In the thread."""
        if record.kind == "open":
            (page,) = record.arguments
            page_id = self.open(page)
            self._held = {} if page.resumed_at is None else self.last_steps()
            return page_id
        if record.kind in ("finish", "roll_back"):
            getattr(self, record.kind)(*record.arguments)
        elif record.kind == "hyper_parameters":
            self.write_hyper_parameters(*record.arguments)
        elif record.kind == "scalars":
            place, values = record.arguments
            if new := {name: value for name, value in values.items() if not self.holds(place, name)}:
                self.write_scalars(place, new)
        elif not self.holds(*record.arguments[:2]):
            getattr(self, f"write_{record.kind}")(*record.arguments)
        return None

    def _close(self, status: str) -> None:
        if self._outbox is not None:
            outbox, self._outbox = self._outbox, None
            outbox.put(Record("finish", (status,)))
            self._former = outbox.close()
            self._page_id = outbox.opened or self._page_id


def _ended(text: str) -> str:
    return f"{text.removesuffix('.')}."


class Rates:
    """What was trained on per second, since the rates were last read."""

    def __init__(self) -> None:
        self._since: tuple[float, tuple[int, ...]] | None = None

    def start(self, progress: Progress, seconds: float) -> None:
        """Measure from here.

        Args:
            progress: the counters of the run.
            seconds: of the clock that `read` is given, too.
        """
        self._since = seconds, tuple(getattr(progress, unit) for unit in UNITS)

    def read(self, progress: Progress, seconds: float) -> dict[str, float]:
        """Return `samples_per_second`, `steps_per_second` and, where losses have counts, `tokens_per_second`.

        Of all ranks, over the time since the last call that gave some. Empty where none was started, and where no
        sample was trained on since, or no time has passed.
        """
        if self._since is None:
            self.start(progress, seconds)
            return {}
        before, counts = self._since
        if seconds <= before or progress.samples == counts[0]:
            return {}
        rates = {
            f"{unit}_per_second": (getattr(progress, unit) - count) / (seconds - before)
            for unit, count in zip(UNITS, counts, strict=True)
            if unit != "tokens" or progress.tokens
        }
        self.start(progress, seconds)
        return rates
