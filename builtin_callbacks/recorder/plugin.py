"""Record what happens in a run, for `heliograph.replay`, `explain` and `timeline`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from ...core.errors import NotRecorded
from ...events import (
    BatchEnd,
    CheckpointLoaded,
    CheckpointPruned,
    CheckpointSaved,
    EpochEnd,
    EpochStart,
    Event,
    Lane,
    Log,
    PluginChanged,
    PluginFailed,
    Replay,
    ResumeVerified,
    Run,
    RunClosed,
    RunFailed,
    SavePoint,
    TestBatchEnd,
    TestEnd,
    TestStart,
    TrainEnd,
    TrainStart,
    ValidationBatchEnd,
    ValidationCut,
    ValidationEnd,
    ValidationStart,
)
from ...events.bus import Receiver, current_owner, is_within
from ...events.checks import check_whole_number
from ...plugins import Plugin, on
from . import attempt_facts
from .format.tail import ROW
from .format.writer import Writer
from .session import Session, counters_of
from .subscriptions import Listening

OFTEN = 1_000  # emissions of an event that is not of the catalogue: of those behind, a sample is kept
pack, ROW_SIZE = ROW.pack_into, ROW.size


class Recorder(Plugin):
    """Record events, counters, metrics, requests with who asked and why, failures, and the time of every handler.

    One file `<run>_<date>_<time>.recording` holds a run: a resumed run goes on in the file that its checkpoint names,
    tests and validations on their own in that of the last fit. A run that is killed leaves everything up to its last
    batch. `run.recording` and `result.recording` say where it lies.

    While it records, the run's clock stands still from one batch or event to the next, and goes by hundredths of a
    second, so that the recording holds the very times that plugins see. On several ranks the main one records.

    Args:
        folder: where to write; made where it is missing.
        losses: whether the loss of every batch is recorded too; of several optimizers, the last one's of the batch.
        sample: the handlers of the events of every batch are timed in the first 256, then in one of so many; those of
            others always.

    Raises:
        TypeError: an argument is of another type.
        ValueError: `sample` is no whole number of at least 1, or there is a file where the folder is to be.
    """

    policy = "observer"
    draws = False
    ranks = "main"
    exclusive = ("recorder",)

    def __init__(self, folder: str | Path, *, losses: bool = False, sample: int = 1000) -> None:
        if not isinstance(folder, str | Path):
            raise TypeError(f"Recorder(folder) takes the path of a folder, got {folder!r}.")
        if not isinstance(losses, bool):
            raise TypeError(f"losses is True or False, got {losses!r}.")
        self.sample = check_whole_number("sample", sample, of="batches", at_least=1)
        self.folder, self.losses = Path(folder), losses
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"Recorder(folder) takes the path of a folder, but {self.folder} is a file.")
        self.path: Path | None = None
        self._session: Session | None = None
        self._listening: Listening | None = None
        self._expected: Log | ValidationEnd | TestEnd | None = None
        self._error: BaseException | None = None
        self._goes_on = self._is_over = False
        self._sets: dict[str, int] = {}
        self._foreign: dict[type[Event], int] = {}

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Forget the former run; which file it is to be turns out when the state is loaded."""
        self.close()
        self._session = self.path = None
        self._note(run, event, {})

    @on(BatchEnd, lane=Lane.TRANSFORM)
    def count(self, run: Run, event: BatchEnd) -> None:
        """Keep the counters of a batch, at the time that all who hear of it are to read."""
        session = self._session
        if session is None or (at := session.at) == session.alarm:
            self._ready(run).count(run)
            return
        if monotonic() >= session.due:
            session.tick()
        progress = session.progress
        pack(
            session.buffer, at, session.hundredths, progress.steps, progress.skipped_steps, progress.skipped_batches,
            progress.samples, run.window, progress.batch,
        )  # fmt: skip
        session.at = at + ROW_SIZE

    @on(CheckpointLoaded, lane=Lane.TRANSFORM)
    def go_on(self, run: Run, event: CheckpointLoaded) -> None:
        """Mark the seam."""
        session = self._ready(run)
        session.turn_back()
        origin = asdict(counters_of(run.origin)) | {"seconds": run.origin.earlier_seconds}
        self._listen(run)
        self._note(run, event, {**attempt_facts.fields_of(event), "origin": origin, "in_boundary": run.in_boundary})

    @on(EpochStart, lane=Lane.TRANSFORM)
    def note_epoch(self, run: Run, event: EpochStart) -> None:
        """Note how long the epoch is."""
        self._listen(run)
        self._note(run, event, {**attempt_facts.fields_of(event), "batches": run.batches_per_epoch})

    @on(ValidationStart, TestStart, lane=Lane.TRANSFORM)
    def note_evaluation(self, run: Run, event: ValidationStart | TestStart) -> None:
        """Note how many batches are to come."""
        self._listen(run)
        self._sets.clear()
        self._note(run, event, {"batches": run.evaluation_batches})

    @on(ValidationBatchEnd, TestBatchEnd, lane=Lane.TRANSFORM)
    def count_evaluation(self, run: Run, event: ValidationBatchEnd | TestBatchEnd) -> None:
        """Count the batches of a set."""
        self._sets[event.dataset] = self._sets.get(event.dataset, 0) + 1

    @on(Log, ValidationEnd, TestEnd, lane=Lane.TRANSFORM)
    def expect_metrics(self, run: Run, event: Log | ValidationEnd | TestEnd) -> None:
        """Note that there are metrics, which others may add to before they are read."""
        self._finish()
        self._ready(run).hold(event.name)
        self._expected = event

    @on(Log, ValidationEnd, TestEnd, lane=Lane.REPORT)
    def note_metrics(self, run: Run, event: Log | ValidationEnd | TestEnd) -> None:
        """Note the metrics, behind all who add to them."""
        self._finish()
        session = self._ready(run)
        session.add_spent()
        session.send()

    @on(Replay, lane=Lane.TRANSFORM)
    def note_replay(self, run: Run, event: Replay) -> None:
        """Note that a loader is read again, and when it is where it stood."""
        if event.done in (0, event.batches):
            self._note(run, event, attempt_facts.fields_of(event))

    @on(ValidationCut, lane=Lane.TRANSFORM)
    def note_cut(self, run: Run, event: ValidationCut) -> None:
        """Note how far the validation or test came."""
        self._note(run, event, {**attempt_facts.fields_of(event), "batches": dict(self._sets)})

    @on(SavePoint, TrainEnd, EpochEnd, lane=Lane.TRANSFORM)
    def note_moment(self, run: Run, event: SavePoint | TrainEnd | EpochEnd) -> None:
        """Note that a save is due, or that an epoch or the training is over."""
        self._note(run, event, attempt_facts.fields_of(event))

    @on(CheckpointSaved, CheckpointPruned, ResumeVerified, lane=Lane.TRANSFORM)
    def note_checkpoint(self, run: Run, event: CheckpointSaved | CheckpointPruned | ResumeVerified) -> None:
        """Note what lies on the disk, or no longer does, and what comparing with it has shown."""
        self._note(run, event, attempt_facts.fields_of(event), ticks=False)

    @on(PluginChanged, PluginFailed, lane=Lane.TRANSFORM)
    def note_plugin(self, run: Run, event: PluginChanged | PluginFailed) -> None:
        """Note who joins, leaves or fails; others may hear now what nobody heard before."""
        self._listen(run)
        session = self._session
        if isinstance(event, PluginFailed) and event.plugin == current_owner() and session is not None:
            session.happened(event.name, attempt_facts.fields_of(event))  # what failed may be the writing itself
        else:
            self._note(run, event, attempt_facts.fields_of(event), ticks=False)

    @on(RunFailed, lane=Lane.TRANSFORM)
    def note_failure(self, run: Run, event: RunFailed) -> None:
        """Note the error."""
        self._error = event.error
        self._finish()
        data = attempt_facts.failure_of(run, event, losses=self.losses)
        self._note(run, event, {**data, "batches": dict(self._sets)})

    @on(RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: RunClosed) -> None:
        """Note how the run ended, and where the time went."""
        self._finish()
        error, self._error = self._error, None
        session = self._ready(run)
        session.add_spent(now=True)
        self._note(run, event, attempt_facts.ending_of(run, event, error))
        self._is_over = True

    def note_foreign(self, run: Run, event: Event) -> None:
        """Note an event that is not of the catalogue; of one that comes very often, a sample."""
        kind = type(event)
        number = self._foreign[kind] = self._foreign.get(kind, 0) + 1
        if number <= OFTEN or number % self.sample == 0:
            often = {"emission": number} if number > OFTEN else {}
            self._note(run, event, {**attempt_facts.fields_of(event), **often}, ticks=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the file's name."""
        return {"file": None if self.path is None else self.path.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the file of the run that is resumed, if it is still there; amid a run it is this one's already."""
        if state["file"] is not None and (self._session is None or self._session.path is None):
            self.path, self._goes_on = self.folder / Path(state["file"]).name, True

    def close(self) -> None:
        """Write what there is and close the file; the run's clock goes on."""
        self._goes_on = False
        if (session := self._session) is None:
            return
        self._finish()
        if self._listening is not None:
            self._listening.detach()
        self._session = None if self._is_over else session
        session.close()

    def _note(self, run: Run, event: Event, data: Mapping[str, Any], *, ticks: bool = True) -> None:
        session = self._ready(run)
        session.happened(event.name, data, ticks=ticks)
        session.send()

    def _finish(self) -> None:
        """Take in the event whose metrics were waited for, with those that it has by now."""
        event, self._expected = self._expected, None
        if event is not None and self._session is not None:
            done = {} if isinstance(event, Log) else {"batches": dict(self._sets)}
            self._session.let_go({**attempt_facts.metrics_of(event.metrics), **done})

    def _ready(self, run: Run) -> Session:
        """Return the session of the run, with its file as soon as it is known which."""
        session = self._session
        if session is None or session.progress is not run.progress:
            session = self._begin(run)
        if session.writer is None and not is_within(TrainStart.name):
            session.open(self._writer(run, session.path or self.path))
            self.path = run.recording = session.path
        return session

    def _begin(self, run: Run) -> Session:
        if run.is_replay:
            raise NotRecorded("a training that could be recorded")
        self.close()
        session = self._session = Session(run, self.sample, losses=self.losses)
        if session.attempt.phase == "train" and not self._goes_on:
            self.path = None
        self._is_over, self._error, self._foreign = False, None, {}
        following: dict[type[Event], tuple[Receiver, ...]] = {
            Log: (self.expect_metrics, self.note_metrics),
            Replay: (self.note_replay,),
        }
        self._listening = Listening(current_owner() or self.name, self.note_foreign, following)
        self._listen(run)
        return session

    def _listen(self, run: Run) -> None:
        """Hear and time what is on the bus by now."""
        session = self._session
        if session is not None and self._listening is not None:
            self._listening.attach(run)
            session.timing.attach()

    def _writer(self, run: Run, path: Path | None) -> Writer:
        """Return the file that the run has, or a new one."""
        if path is not None and path.exists():
            try:
                return Writer.again(path)
            except ValueError as error:
                run.note(f"the recording goes on in a new file: {error}")
        return Writer.new(self.folder, run.name)
