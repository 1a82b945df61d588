"""Drive plugins with a recorded run, and report what they would have asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from heliograph import Bus, Lane, NotRecorded, Plugins, Run, SavePoint
from heliograph.events import Event, Request
from heliograph.spi import describe_error

from ..format.reader import damage_in_short, read
from ..format.records import AttemptRecord, Batches, Counters, EventEntry, Recording, RepeatEntry, RequestEntry
from .attempt import AttemptReplay, plugins_on_steps
from .plugin_states import Snapshots, Switches
from .report import Findings, RecordedAttempt, Replayed


def replay(recording: str | Path | Recording, plugins: Iterable[Any]) -> Replayed:
    """Drive plugins with a recorded run, without its model and data, and return what they would have asked.

    The recorded run continues as it did, whatever the plugins request: the report says which requests the run served
    too, and where it would have ended. The plugins are alone, as in a trainer without others; what plugins of other
    names requested in the run is in `run.control`. Where the run was resumed or rolled back, they continue from the
    state that a checkpoint would have had of them: all of them, as if they had been in the run from the start.

    A plugin that needs something that is not recorded, such as the model, gets an error and is switched off from there
    on. One that raises another error would have failed the run, and is switched off for the rest of that attempt.

    Args:
        recording: the file that `Recorder` wrote, a folder of such files (the newest is read), or a recording.
        plugins: plugin objects, in their order; each replaces the one of its name in the run.

    Raises:
        FileNotFoundError: there is no recording.
        ValueError: it is not a recording, or of another format; plugins contradict each other.
        TypeError: the recording is not a path, a plugin is not one, or a handler does not fit its event.
    """
    source = recording if isinstance(recording, Recording) else read(recording)
    return ReplaySession(source, plugins).replay()


class ReplaySession:
    """One replay.

    Args:
        recording: the recording.
        plugins: the replayed plugins.
    """

    def __init__(self, recording: Recording, plugins: Iterable[Any]) -> None:
        self._recording, self._bus = recording, Bus()
        self._plugins = Plugins(self._bus)
        self._forgive_observer = self._bus.forgiver
        self._bus.forgiver = self._forgive
        if not isinstance(plugins, Iterable):
            raise TypeError(f"replay takes a list of plugin objects: plugins=[{type(plugins).__name__}(...)].")
        for plugin in plugins:
            self._plugins.register(plugin)
        self._bus.on(SavePoint, self._save, lane=Lane.PERSIST)  # where checkpoints are written
        self._names = self._plugins.names()
        self._findings, self._switches = Findings(), Switches(self._plugins)
        self._snapshots = Snapshots(self._plugins, self._switches)
        self._attempt = 0
        self._length: int | None = None
        self._current: AttemptReplay | None = None

    def replay(self) -> Replayed:
        attempts, findings = self._recording.attempts, self._findings
        known = {name for attempt in attempts for names in attempt.plan.values() for name in names}
        for self._attempt, attempt in enumerate(attempts, 1):
            findings.begin(self._attempt)
            for text in damage_in_short(attempt):
                findings.note(f"attempt {self._attempt} is damaged: {text}")
            self._replay_attempt(attempt, known)
        if not attempts:
            findings.note("nothing is recorded: the run was killed before it started")
        return Replayed(
            recording=self._recording.path,
            plugins=tuple(self._names),
            asked=findings.asked(),
            recorded=tuple(describe_attempt(number, each, self._names) for number, each in enumerate(attempts, 1)),
            ends=tuple(findings.ends),
            unheld={name: tuple(texts) for name, texts in findings.unheld.items()},
            failed={name: tuple(texts) for name, texts in findings.failed.items()},
            notes=tuple(findings.notes),
        )

    def _replay_attempt(self, attempt: AttemptRecord, known: set[str]) -> None:
        self._current = AttemptReplay(
            self._attempt,
            attempt,
            self._recording.path,
            self._bus,
            self._names,
            self._switches,
            self._snapshots,
            self._findings,
        )
        run = self._current.run
        self._switches.begin(attempt, known)
        self._plugins.open(run)
        try:
            if attempt.phase == "train":
                self._plugins.reset()
            if run.is_named:
                for name in plugins_on_steps(self._bus) & set(self._names):
                    self._switch_off(name, NotRecorded("the order in which several optimizers were stepped"), "")
            self._current.replay(self._length)
        finally:
            for name, error in self._plugins.close():
                self._findings.add_failure(name, f"{describe_error(error)} (on close, attempt {self._attempt})")
        self._length = run.length.batches_per_epoch
        for note in (*run.report.notes, *(f"WARNING: {warning}" for warning in run.report.warnings)):
            self._findings.note(note)
        self._snapshots.forget_unwritten()

    def _save(self, run: Run, event: SavePoint) -> None:
        assert self._current is not None
        self._current.save()

    def _forgive(self, owner: str, run: Run, event: Event, error: BaseException) -> bool:
        if owner not in self._names or BaseExceptionGroup("", [error]).subgroup(KeyboardInterrupt):
            return False
        if isinstance(error, NotRecorded):
            self._switch_off(str(owner), error, event.name)
            return True
        if self._forgive_observer is not None and self._forgive_observer(owner, run, event, error):
            return True
        if not isinstance(error, Exception):
            return False
        where = self._position(event.name)
        self._findings.add_failure(str(owner), f"{describe_error(error)} ({where})")
        self._note_failure(str(owner), event, error)
        self._switches.set(str(owner), "failed", off=True)
        return True

    def _switch_off(self, name: str, error: NotRecorded, event: str) -> None:
        self._findings.add_unheld(name, f"{error} ({self._position(event)})")
        self._switches.set(name, "unheld", off=True)

    def _note_failure(self, name: str, event: Event, error: Exception) -> None:
        assert self._current is not None
        progress = self._current.run.progress
        did = self._current.fails_by(name, event.name)
        where = (progress.epoch, progress.batch, progress.steps)
        self._findings.add_end(name, f"{describe_error(error)} on {event.name}", where, did=did, failure=True)

    def _position(self, event: str) -> str:
        assert self._current is not None
        progress = self._current.run.progress
        on = f"{event}, " if event else ""
        return f"{on}attempt {self._attempt}, epoch {progress.epoch} batch {progress.batch} step {progress.steps}"


def describe_attempt(number: int, attempt: AttemptRecord, names: Iterable[str]) -> RecordedAttempt:
    requests: dict[int, Request] = {}
    place, reason = Counters(), ""
    for entry in attempt.entries:
        if isinstance(entry, RequestEntry) and entry.request.by in names:
            requests[entry.number] = replace(entry.request)
        elif isinstance(entry, RepeatEntry) and entry.number in requests:
            requests[entry.number].times = entry.times
        elif isinstance(entry, EventEntry):
            place, reason = entry.counters, str(entry.data.get("reason", "")) if entry.event == "run_closed" else ""
        elif isinstance(entry, Batches):
            place = entry.last
    return RecordedAttempt(
        number, attempt.status, reason, place.epoch, place.batch, place.steps, tuple(requests.values())
    )
