"""The base class of trackers, which write in a separate thread, and the tracker for TensorBoard."""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from datetime import datetime
from itertools import count as counter
from pathlib import Path
from threading import Condition, Thread
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from ..core.checkpoint.storage import clean
from ..core.system.extras import require
from ..events import Event, Lane, LogCurve, LogFile, LogHistogram, LogImage, LogText
from ..events import catalogue as ev
from ..events.checks import describe_error
from ..events.progress import Rates
from ..plugins import Plugin, on

if TYPE_CHECKING:
    from ..events import Run

SAVED = ("scalars", "text", "hyper_parameters")  # kinds of unwritten records that a checkpoint contains


@dataclass(frozen=True, slots=True)
class Page:
    """The page of a run.

    Attributes:
        name: the name of the run.
        training_id: the identifier of the training, equal in all of its attempts.
        id: the id of the page to continue, as returned by `open`; None for a new page.
        attempt: the number of runs on this page, including this one: 1, increased at each resume.
        resumed_at: the optimizer step at which the training was resumed; None if it was not, and outside of a training.
    """

    name: str
    training_id: str
    id: str | None
    attempt: int
    resumed_at: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a run at the time of a log.

    Attributes:
        step: optimizer steps.
        epoch: epochs done, such as 1.25; only finished ones if the loader has no length.
        samples: training samples.
        seconds: seconds since the training began, including earlier attempts.
        attempt: the attempt of the page.
        rollbacks: how often the training has rolled back so far; afterwards, steps are repeated.
    """

    step: int
    epoch: float
    samples: int
    seconds: float
    attempt: int
    rollbacks: int


@dataclass(frozen=True, slots=True)
class TrackerRecord:
    """An item to write.

    Attributes:
        kind: the suffix of the tracker's method `write_<kind>`; or `open`, `roll_back` or `finish`.
        arguments: the arguments of that method.
        size: the bytes of its arrays and texts.
    """

    kind: str
    arguments: tuple[Any, ...]
    size: int = 0

    @property
    def values(self) -> int:
        """The number of values that it writes to a page."""
        return 1 + len(self.arguments[1]) if self.kind == "scalars" else 1

    def as_plain(self) -> list[Any]:
        return [
            self.kind,
            *(list(astuple(argument)) if isinstance(argument, Place) else argument for argument in self.arguments),
        ]


def record_of(plain: list[Any]) -> TrackerRecord:
    kind, *arguments = plain
    return TrackerRecord(
        kind, tuple(Place(*argument) if isinstance(argument, list) else argument for argument in arguments)
    )


AXES: Final = tuple(field.name for field in fields(Place))
TAKEN: Final = frozenset((*AXES, "training"))  # names that trackers use themselves


def free_name(kind: str, name: str) -> str:
    """Return the name of a value: `metric/epoch` if `epoch` is a field of `Place`."""
    return f"{kind}/{name}" if name in TAKEN else name


MEMORY: Final = 256 * 2**20  # maximum bytes of waiting records
ALWAYS: Final = ("open", "roll_back", "finish")  # never dropped
BATCH: Final = 1000  # maximum number of collected values before a flush
ROWS: Final = ("scalars", "text")  # stored until safe; hyper-parameters are written again with each page
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between two attempts to write a record
DRAIN_PATIENCE: Final = 1.0  # seconds; the training waits for a save

logger = logging.getLogger("heliograph")


class Outbox:
    """Writes the records of a tracker in order, in a daemon thread that starts with the first record.

    Args:
        tracker: the tracker, whose attributes say how to write.
        write: writes one record, or several of the kinds in `tracker.collects`; called in the thread.
        previous: the thread of the previous outbox, which may still be in a request; the new thread waits for its end.

    Attributes:
        opened: the return value of `write` for `open`.
        refused: the error that prevented the page from opening; nothing is written then.
        lost: the number of records that were not written, by reason and kind.
    """

    def __init__(
        self, tracker: Tracker, write: Callable[[list[TrackerRecord]], Any], previous: Thread | None = None
    ) -> None:
        self._tracker, self._write, self._previous = tracker, write, previous
        self._queue: deque[TrackerRecord] = deque()
        self._suspects = 0  # records at the head of the queue that were refused together: they are written one by one
        self._settling: deque[tuple[float, TrackerRecord]] = deque()  # with the time of the write
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_closing = False
        self._bytes = self._written = 0
        self._outage = self._refusal = self._given_up = ""  # the current error, the first refusal, the reason
        self.opened: Any = None
        self.refused = ""
        self.lost: dict[str, Counter[str]] = {}

    def put(self, record: TrackerRecord) -> None:
        """Add a record, or drop it if too many wait."""
        with self._changed:
            if self._given_up:
                self._lose(record, self._given_up)
                return
            is_full = len(self._queue) >= self._tracker.capacity or self._bytes + record.size > MEMORY
            if is_full and record.kind not in ALWAYS:
                self._lose(record, f"more than {self._tracker.capacity} records, or {MEMORY // 2**20} MB, waited")
                return
            self._queue.append(record)
            self._bytes += record.size
            if self._thread is None:
                self._thread = Thread(target=self._run, name=f"heliograph-{self._tracker.name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def waiting(self) -> list[TrackerRecord]:
        """Return the records that are not yet written or not yet safe."""
        with self._changed:
            self._settle()
            return [*(record for _, record in self._settling), *self._queue]

    def drain(self) -> None:
        """Wait until everything is written; stop in an outage or without progress."""
        with self._changed:
            while self._queue and not self._outage and self._waits_for_progress(DRAIN_PATIENCE):
                pass

    def close(self) -> Thread | None:
        """Wait until everything is written or there is no more progress; drop the rest.

        Returns:
            The thread if it is blocked in a write, else None.
        """
        with self._changed:
            if self._thread is None:
                return None
            self._is_closing = True
            self._changed.notify_all()
            while self._queue and self._waits_for_progress(self._tracker.patience, through_outages=True):
                pass
            is_done = not self._queue
            if not is_done:
                self._give_up(self._outage or f"nothing was written for {self._tracker.patience:g} seconds")
        if is_done:
            self._thread.join()
        return None if is_done else self._thread

    def _waits_for_progress(self, patience: float, through_outages: bool = False) -> bool:
        before = self._written
        self._changed.wait_for(
            lambda: not self._queue or self._written > before or (bool(self._outage) and not through_outages), patience
        )
        return self._written > before

    def _settle(self) -> None:
        while self._settling and self._settling[0][0] < monotonic() - self._tracker.settles:
            self._settling.popleft()

    # The methods below run in the thread.

    def _run(self) -> None:
        if self._previous is not None:
            self._previous.join()
        pause = FIRST_PAUSE
        try:
            while records := self._next():
                try:
                    self._write_records(records)
                except self._tracker.outages as error:
                    pause = self._wait(describe_error(error), pause)
                else:
                    pause = FIRST_PAUSE
                    if self._outage:
                        with self._changed:
                            self._outage = ""
                        logger.info("%s can be written again", self._tracker.name)
        except BaseException as error:
            with self._changed:
                self._give_up(describe_error(error))
            raise

    def _next(self) -> list[TrackerRecord]:
        """Wait for a record; return it, or several that are written together."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            records: list[TrackerRecord] = []
            values = 0
            for record in self._queue:
                values += record.values
                is_single = self._suspects > 0 or record.kind not in self._tracker.collects
                if records and (is_single or values > BATCH):
                    break
                records.append(record)
                if is_single:
                    break
            return records

    def _write_records(self, records: list[TrackerRecord]) -> None:
        try:
            result = None if self.refused else self._write(records)
        except self._tracker.outages:
            raise
        except Exception as error:  # noqa: BLE001  # counted, logged, and said in the result
            if len(records) > 1:
                self._suspects = len(records)
                return
            self._note_refusal(records[0], describe_error(error))
        else:
            if records[0].kind == "open":
                self.opened = result
        for record in records:
            self._remove(record)

    def _remove(self, record: TrackerRecord) -> None:
        with self._changed:
            if self._given_up:  # dropped while it was written
                return
            self._queue.popleft()
            self._bytes -= record.size
            self._suspects = max(0, self._suspects - 1)
            self._written += 1
            if self.refused and record.kind != "open":
                self._lose(record, self.refused)
            elif self._tracker.settles and record.kind in ROWS:
                self._settling.append((monotonic(), record))
                self._settle()
            self._changed.notify_all()

    def _wait(self, error: str, pause: float) -> float:
        if not self._outage:
            logger.warning("%s cannot be written, records are queued: %s", self._tracker.name, error)
        with self._changed:
            self._outage, was_closing = error, self._is_closing
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._given_up or self._is_closing is not was_closing, pause)
        return FIRST_PAUSE if self._is_closing else min(2 * pause, LONGEST_PAUSE)

    # Lost records.

    def _note_refusal(self, record: TrackerRecord, error: str) -> None:
        with self._changed:
            if self._given_up:  # already counted
                return
            is_first, self._refusal = not self._refusal, self._refusal or error
            if record.kind == "open":
                self.refused = error
            self._lose(record, self._refusal)
        if is_first:
            logger.warning("%s did not write a record (%s): %s", self._tracker.name, record.kind, error)

    def _give_up(self, reason: str) -> None:  # called with the lock
        if not self._given_up:
            self._given_up = reason
            for record in self._queue:
                self._lose(record, reason)
            self._queue.clear()
            self._changed.notify_all()

    def _lose(self, record: TrackerRecord, reason: str) -> None:
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


class Tracker(Plugin):
    """Base class of trackers, which show a run on a page.

    A page may have metrics, images, texts, histograms, curves, files and hyper-parameters. In a subclass, write `open`,
    `finish`, and the `write_...` methods of the kinds that it can show. They are called in a thread of the tracker, in
    the order of the logs, so the training never waits for them. During an outage, records are queued. The result has a
    warning with the number of records that were not written.

    A resumed run continues the page of its checkpoint: it first writes the records that were queued in the checkpoint,
    and omits points that the page already has. A metric with the name of a field of `Place`, or `training`, is shown as
    `metric/epoch` and so on.

    Attributes:
        outages: errors after which a record is written again, with pauses that increase up to 5 seconds; any other
            error drops the record.
        capacity: the maximum number of queued records.
        patience: at the end of a run, seconds without progress after which the rest is dropped.
        settles: seconds after which a written record survives a kill of the process. Until then checkpoints contain it,
            and a resumed run writes it again if the page lacks it.
        collects: kinds of records, such as `scalars`, that their method collects and `flush` writes together.
        shares_rows: whether images, texts and so on are in one row with the fields of `Place`, so that such names are
            shown as `image/epoch` and so on.
        is_local: whether it writes local files. A checkpoint then waits until everything is written, but not in an
            outage, nor longer than a second without progress; records that are still queued are in the checkpoint.
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
        if self.collects and (type(self).flush is Tracker.flush or not WRITTEN.issuperset(self.collects)):
            kinds = f"kinds of {', '.join(sorted(WRITTEN))}"
            raise TypeError(f"{type(self).__name__} has collects = {self.collects!r}: it takes {kinds}, with flush.")
        self._outbox: Outbox | None = None
        self._previous: Thread | None = None  # of an earlier run, if it is still in a request
        self._rates = Rates()
        self._page_id: str | None = None
        self._attempt, self._rollbacks = 1, 0
        self._resumed_at: int | None = None
        self._waiting: list[TrackerRecord] = []  # queued in the checkpoint
        self._left_out: Mapping[str, int] = {}  # the number of queued records that the checkpoint lacks, by kind
        self._held: Mapping[str, int] = {}  # the last step of each name on the page, beyond the checkpoint
        self._held_rollbacks = 0
        self._status: str | None = None  # of the training on the page
        self._trains = self._has_ended = False  # `_has_ended`: from `RunClosed` until the next run begins
        self._unknown: Counter[str] = Counter()
        self._remarks: list[str] = []

    # Methods for subclasses.

    def prepare(self, run: Run) -> None:
        """Check in `TrainStart`, in the loop's thread, for example for a key or a folder."""

    @abstractmethod
    def open(self, page: Page) -> str:
        """Create a page, or continue the page `page.id`; return its id for checkpoints.

        A checkpoint that was saved before the page was open has no id. If `page.resumed_at` is not None, continue a
        page with the same `page.training_id`, if there is one.
        """

    def last_steps(self) -> Mapping[str, int]:
        """Return the last written step of each metric on a continued page.

        A killed run may have written more than its checkpoint contains; repeated records up to these steps are omitted.
        Return an empty dict if the page is new or was cut back to the checkpoint.
        """
        return {}

    def holds(self, place: Place, name: str) -> bool:
        """Return whether a continued page already shows a record, which is then omitted.

        By default this compares the step with `last_steps`.
        """
        return place.step <= self._held.get(name, -1) and place.rollbacks <= self._held_rollbacks

    @abstractmethod
    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        """Write metrics, which may be infinite or NaN."""

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        """Write the run's hyper-parameters: numbers, flags and strings.

        Called when a page is opened or continued.
        """

    def write_image(self, place: Place, name: str, image: Any) -> None:
        """Write an image: a `uint8` array of shape (height, width, 3)."""

    def write_text(self, place: Place, name: str, text: str) -> None:
        """Write a text."""

    def write_histogram(self, place: Place, name: str, values: Any) -> None:
        """Write the distribution of a one-dimensional array."""

    def write_curve(self, place: Place, name: str, labels: Any, scores: Any) -> None:
        """Write a precision-recall curve from arrays of labels and scores."""

    def write_file(self, place: Place, name: str, path: Path) -> None:
        """Store a file."""

    def flush(self) -> None:
        """Write the collected records of the kinds in `collects`: at most 1,000 values, and no records between them."""

    def discard(self) -> None:
        """Discard the collected records: after each `flush`, and if one of them cannot be written.

        After an outage, the same records are collected again. After another error, each is collected and flushed alone.
        """

    def roll_back(self, place: Place) -> None:
        """Continue at the earlier step `place.step`: later steps are repeated and differ."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """Write how the run ended, and close the page.

        Args:
            status: `completed`, `stopped`, `preempted` (stopped because the machine is needed), `interrupted` or
                `failed`. After an evaluation on the page of a training, the status of the training.
        """

    # Handlers.

    def reset(self) -> None:
        self._page_id, self._attempt, self._rollbacks, self._waiting = None, 1, 0, []
        self._rates, self._resumed_at, self._status, self._left_out = Rates(), None, None, {}

    @on(ev.TrainStart)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Check whether a page can be created."""
        self._trains = True
        self.prepare(run)

    @on(ev.CheckpointLoaded)
    def note_load(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Record a resume or a roll-back; restart the measurement of the throughput."""
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
        """Add the throughput and the learning rates to the log."""
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

    @on(LogImage, LogText, LogHistogram, LogCurve, LogFile, lane=Lane.REPORT, optional=True)
    def write_payload(self, run: Run, event: Event) -> None:
        """Write an image, a text, a histogram, a curve or a file, or count it as unsupported."""
        kind = KINDS[type(event)]
        if not self._writes(kind):
            self._unknown[kind] += 1
            return
        title, *values = vars(event).values()
        self._put(run, kind, self._place(run), free_name(kind, title) if self.shares_rows else title, *values)

    @on(ev.RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: ev.RunClosed) -> None:
        """Write how the run ended, wait for the records, and warn about lost ones."""
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
            why = outbox.refused.removesuffix(".")
            run.warn(f"{self.name} shows nothing of this run because it could not open a page: {why}.")
        else:
            for reason, lost in outbox.lost.items():
                records = ", ".join(f"{NAMES[kind]} ({count})" for kind, count in lost.items())
                run.warn(f"{self.name} lost {records}: {reason.removesuffix('.')}.")
        for kind, count in self._unknown.items():
            run.note(f"{self.name} cannot show values logged as {kind} ({count} times)")
        for text in self._remarks:
            run.note(text)
        self._unknown.clear()
        self._remarks.clear()

    # State.

    def state_dict(self) -> dict[str, Any]:
        if self._outbox is not None and self.is_local:
            self._outbox.drain()
        waiting = self._waiting if self._outbox is None else self._outbox.waiting()
        return {
            "page": (self._outbox and self._outbox.opened) or self._page_id,
            "attempt": self._attempt,
            "rollbacks": self._rollbacks,
            "waiting": [record.as_plain() for record in waiting if record.kind in SAVED],
            "left_out": dict(Counter(record.kind for record in waiting if record.kind in UNSAVED)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the page; a roll-back keeps the current one."""
        if self._outbox is None and state:
            self._page_id, self._attempt = state["page"], state["attempt"]
            self._rollbacks, self._waiting = state["rollbacks"], [record_of(record) for record in state["waiting"]]
            self._left_out = state["left_out"]

    def close(self) -> None:
        """Close the page; if the tracker is disabled during a run, as stopped."""
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

    def _put(self, run: Run, kind: str, *arguments: Any) -> None:
        if self._has_ended:
            run.warn(f"{self.name} lost {NAMES.get(kind, kind)} logged after its page was closed.")
            return
        size = sum(
            len(argument) if isinstance(argument, str) else getattr(argument, "nbytes", 0) for argument in arguments
        )
        self._ready(run).put(TrackerRecord(kind, arguments, size))

    def _ready(self, run: Run) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self, self._write_records, self._previous)
            resumed_at, self._resumed_at = self._resumed_at, None
            self._attempt += resumed_at is not None
            self._held_rollbacks, self._held = self._rollbacks, {}
            training_id = uuid4().hex if run.report.is_replay else run.checkpoints.training_id
            page = Page(run.name, training_id, self._page_id, self._attempt, resumed_at)
            self._outbox.put(TrackerRecord("open", (page,)))
            kinds = ", ".join(f"{kind} ({count})" for kind, count in self._left_out.items())
            self._left_out = {}
            if kinds:
                self._remark(f"{self.name} may lack records that were queued when the checkpoint was saved: {kinds}")
            waiting, self._waiting = self._waiting, []
            for record in waiting:
                self._outbox.put(record)
            if run.hyper_parameters and self._writes("hyper_parameters"):  # after the values of earlier attempts
                items = run.hyper_parameters.items()
                plain = {
                    str(key): value if isinstance(value, int | float | str) else str(value) for key, value in items
                }
                self._outbox.put(TrackerRecord("hyper_parameters", (plain,)))
        return self._outbox

    def _remark(self, text: str) -> None:
        if text not in self._remarks:
            self._remarks.append(text)

    def _write_records(self, records: list[TrackerRecord]) -> str | None:
        page_id = None
        try:
            for record in records:
                page_id = self._write(record)
            if records[0].kind in self.collects:
                self.flush()
        finally:
            self.discard()
        return page_id

    def _write(self, record: TrackerRecord) -> str | None:
        """Write a record in the thread; return the id of an opened page."""
        if record.kind == "open":
            (page,) = record.arguments
            page_id = self.open(page)
            self._held = {} if page.resumed_at is None else self.last_steps()
            return page_id
        if record.kind == "scalars":
            place, values = record.arguments
            if new := {name: value for name, value in values.items() if not self.holds(place, name)}:
                self.write_scalars(place, new)
        elif record.kind not in KINDS.values() or not self.holds(*record.arguments[:2]):
            getattr(self, record.kind if record.kind in ALWAYS else f"write_{record.kind}")(*record.arguments)
        return None

    def _close(self, status: str) -> None:
        if self._outbox is not None:
            outbox, self._outbox = self._outbox, None
            outbox.put(TrackerRecord("finish", (status,)))
            self._previous = outbox.close()
            self._page_id = outbox.opened or self._page_id


_NUMBERS = counter()  # distinguishes files of the same second
_REVERSED, _MASK, _ALL = 0x82F63B78, 0xA282EAD8, 0xFFFFFFFF  # the polynomial of CRC-32C, the mask of TFRecord files


class TensorBoard(Tracker):
    """Write metrics, images, texts, histograms and curves for TensorBoard.

    The learning rates and the throughput are added to the logged metrics: `train/samples_per_second` and, if losses are
    sums over tokens, `train/tokens_per_second`, measured since the last log, including validations. `GradientClipping`
    adds the gradient norm.

    If the folder contains another run, a new one writes to the subfolder `<run>_<date>_<time>`, which TensorBoard shows
    next to it. A resumed or rolled-back run writes to its own folder again and purges the steps after the checkpoint. A
    stored file is shown as the text of its path.

    Args:
        folder: the folder of the event files; created if it does not exist.
    """

    name = "tensorboard"
    rehearses = True
    patience = 2.0  # a disk responds immediately unless it is full
    is_local = True

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._summary = summary_class()
        self._file: EventFile | None = None
        self._purge: int | None = None
        self._path = self.folder  # of this run
        self._is_new = True
        self._parameters: Mapping[str, Any] = {}
        self._latest: dict[str, float] = {}

    def describe(self, run: Run) -> str:
        return f"logs to {self.folder / (self._page_id or '')}"

    def rehearse(self, folder: Path) -> list[Path]:
        original, self.folder = self.folder, folder
        return [original]

    def prepare(self, run: Run) -> None:
        """Import the module for hyper-parameters, if there are any."""
        if run.hyper_parameters:
            _summaries()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if any(record.kind != "scalars" for record in self._waiting):
            _summaries()

    # The methods below run in the thread.

    def open(self, page: Page) -> str:
        """Select the run's folder; hide the points after the checkpoint."""
        self._path = self.folder / page.id if page.id else self._free_folder(page)
        self._is_new = page.id is None
        self._purge, self._latest, self._parameters = None, {}, {}
        if page.resumed_at is not None:
            self._purge = page.resumed_at + 1
        return self._path.relative_to(self.folder).as_posix()

    def roll_back(self, place: Place) -> None:
        """Hide the points after the position of the checkpoint."""
        self._close_file()
        self._purge = place.step + 1

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        self._latest.update(values)
        self._add(place, *self._scalars(values))

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        """Store them until the end, because they are shown with the final metrics."""
        self._parameters = values

    def write_image(self, place: Place, name: str, image: Any) -> None:
        """Add an image."""
        self._add(place, _summaries().image(name, image, dataformats="HWC"))

    def write_text(self, place: Place, name: str, text: str) -> None:
        """Add a text, which TensorBoard renders as Markdown."""
        self._add(place, _summaries().text(name, text))

    def write_histogram(self, place: Place, name: str, values: Any) -> None:
        """Add a histogram."""
        self._add(place, _summaries().histogram(name, values, bins="sturges"))

    def write_curve(self, place: Place, name: str, labels: Any, scores: Any) -> None:
        """Add a precision-recall curve."""
        self._add(place, _summaries().pr_curve(name, labels, scores))

    def write_file(self, place: Place, name: str, path: Path) -> None:
        """Add the path of the file as a text."""
        self._add(place, _summaries().text(name, f"`{path}`"))

    def finish(self, status: str) -> None:
        """Write the hyper-parameters with the final metrics, and close the file."""
        if self._file is not None and self._parameters:
            chosen = _summaries().hparams(dict(self._parameters), self._latest)
            EventFile(self._path / "hyper_parameters", summaries=[*chosen, *self._scalars(self._latest)]).close()
        self._close_file()

    def close(self) -> None:
        super().close()
        self._close_file()

    def write_payload(self, run: Run, event: Event) -> None:
        """Import the module for summaries, and write an image, a text, a histogram, a curve or a file."""
        _summaries()
        super().write_payload(run, event)

    def _scalars(self, values: Mapping[str, float]) -> list[Any]:
        value = self._summary.Value
        return [self._summary(value=[value(tag=name, simple_value=number)]) for name, number in values.items()]

    def _add(self, place: Place, *summaries: Any) -> None:
        if self._file is None:
            self._file = EventFile(self._path, purge=self._purge)
            self._purge = None
            if self._is_new and self._path != self.folder:
                self._remark(f"{self.folder} contains another run: the curves of this one are in {self._path}")
        self._file.add(summaries, place.step)

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _free_folder(self, page: Page) -> Path:
        path, number = self.folder, 1
        start = f"{clean(page.name)}_{datetime.now():%Y-%m-%d_%H-%M-%S}"
        while any(path.glob("events.out.tfevents.*")):
            path = self.folder / (start if number == 1 else f"{start}-{number}")
            number += 1
        return path


def _summaries() -> Any:
    """Import the module that creates summaries, which takes a third of a usual start.

    The first call is in the main thread, because a process that is forked during an import in a thread may deadlock.
    """
    return require("torch.utils.tensorboard.summary", "TensorBoard")


def summary_class() -> Any:
    """Return the class of summaries, and import all modules that files need.

    Raises:
        ImportError: TensorBoard is not installed.
    """
    _protocol("event")
    return _protocol("summary").Summary


class EventFile:
    """Appends summaries to a new event file.

    Args:
        folder: the folder of the file; created if it does not exist.
        purge: the first step that TensorBoard hides in older files of the folder; None hides nothing.
        summaries: the first summaries.

    Raises:
        OSError: the file cannot be written; it does not exist then.
    """

    def __init__(self, folder: Path, *, purge: int | None = None, summaries: Iterable[Any] = ()) -> None:
        protocol = _protocol("event")
        self._event = protocol.Event
        events = [self._event(wall_time=time.time(), file_version="brain.Event:2")]
        if purge is not None:
            start = protocol.SessionLog
            events.append(self._event(wall_time=time.time(), step=purge, session_log=start(status=start.START)))
        folder.mkdir(parents=True, exist_ok=True)
        place = f"{socket.gethostname()}.{os.getpid()}"
        name = (
            f"events.out.tfevents.{time.time():010.0f}.{place}.{next(_NUMBERS):05d}"  # TensorBoard reads files by name
        )
        self._file = (folder / name).open("xb", buffering=0)
        self._end = 0
        try:
            self._write([*events, *self._events(summaries, 0)])
        except OSError:  # the next attempt creates another file
            self._file.close()
            (folder / name).unlink()
            raise

    def add(self, summaries: Iterable[Any], step: int) -> None:
        """Append all summaries, or none.

        Raises:
            OSError: the summaries cannot be written; the file is unchanged.
        """
        self._write(self._events(summaries, step))

    def close(self) -> None:
        self._file.close()

    def _events(self, summaries: Iterable[Any], step: int) -> list[Any]:
        return [self._event(wall_time=time.time(), step=step, summary=summary) for summary in summaries]

    def _write(self, events: Iterable[Any]) -> None:
        content = b"".join(record(event.SerializeToString()) for event in events)
        try:
            self._put(content)
        except OSError:
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise
        self._end += len(content)

    def _put(self, content: bytes) -> None:
        written = 0
        while written < len(content):
            written += self._file.write(content[written:])


def _protocol(part: str) -> Any:
    return require(f"tensorboard.compat.proto.{part}_pb2", "TensorBoard")


def record(content: bytes) -> bytes:
    """Return a TFRecord: length and content, each followed by its checksum."""
    length = struct.pack("<Q", len(content))
    return b"".join((length, _checksum(length), content, _checksum(content)))


def _checksum(content: bytes) -> bytes:
    crc = _ALL
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= _ALL
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & _ALL)


def _of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (_REVERSED if crc & 1 else 0)
    return crc


_TABLE = tuple(map(_of_byte, range(256)))
