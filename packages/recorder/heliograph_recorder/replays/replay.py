"""Replay plugins with a recorded run, and report their requests."""

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
from .report import RecordedAttempt, Replayed, ReplayFindings


def replay(recording: str | Path | Recording, plugins: Iterable[Any]) -> Replayed:
    """Run plugins against a recorded run, without its model and data, and return their requests.

    The requests of the plugins do not change the recorded run. The result shows for each request whether the recorded
    run did the same, and where a plugin would have ended the run. No other plugins run, but their recorded requests are
    in `run.control`. If the run was resumed or rolled back, all replayed plugins continue from the state that the
    checkpoint would have contained, as if they had been in the run from the start.

    A plugin that needs unrecorded data, such as the model, gets `NotRecorded` and is switched off for the rest of the
    replay. A plugin that raises another error would have failed the run, and is switched off until the next attempt.

    Args:
        recording: the file that `Recorder` wrote, a folder of recordings (the newest is read), or a `Recording`.
        plugins: the plugin objects in their order; they replace the plugins of the same names in the run.

    Raises:
        FileNotFoundError: there is no recording.
        ValueError: the file is not a recording, or of another format; or plugins contradict each other.
        TypeError: the recording is not a path, an object is not a plugin, or a handler does not fit its event.
    """
    source = recording if isinstance(recording, Recording) else read(recording)
    return ReplaySession(source, plugins).replay()


class ReplaySession:
    """One replay of a recording with plugins."""

    def __init__(self, recording: Recording, plugins: Iterable[Any]) -> None:
        self._recording, self._bus = recording, Bus()
        self._plugins = Plugins(self._bus)
        self._forgive_observer = self._bus.forgiver
        self._bus.forgiver = self._switch_off_failed
        for plugin in plugins:
            self._plugins.register(plugin)
        self._bus.on(SavePoint, self._save, lane=Lane.PERSIST)  # where checkpoints are written
        self._names = self._plugins.names()
        self._findings, self._switches = ReplayFindings(), Switches(self._plugins)
        self._snapshots = Snapshots(self._plugins, self._switches)
        self._attempt = 0
        self._length: int | None = None
        self._current: AttemptReplay | None = None

    def replay(self) -> Replayed:
        attempts, findings = self._recording.attempts, self._findings
        recorded = {name for attempt in attempts for names in attempt.plan.values() for name in names}
        for self._attempt, attempt in enumerate(attempts, 1):
            findings.attempt = self._attempt
            for text in damage_in_short(attempt):
                findings.note(f"attempt {self._attempt} is damaged: {text}")
            self._replay_attempt(attempt, recorded)
        if not attempts:
            findings.note("nothing is recorded: the run was killed before it started")
        return Replayed(
            recording=self._recording.path,
            plugins=tuple(self._names),
            asked=tuple(findings.requests),
            recorded=tuple(_describe_attempt(number, record, self._names) for number, record in enumerate(attempts, 1)),
            ends=tuple(findings.ends),
            unheld={name: tuple(texts) for name, texts in findings.unheld.items()},
            failed={name: tuple(texts) for name, texts in findings.failed.items()},
            notes=tuple(findings.notes),
        )

    def _replay_attempt(self, attempt: AttemptRecord, recorded: set[str]) -> None:
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
        self._switches.begin(attempt, recorded)
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
                self._findings.failed[name][f"{describe_error(error)} (on close, attempt {self._attempt})"] = None
        self._length = run.length.batches_per_epoch
        for note in (*run.report.notes, *(f"WARNING: {warning}" for warning in run.report.warnings)):
            self._findings.note(note)
        self._snapshots.unwritten.clear()

    def _save(self, run: Run, event: SavePoint) -> None:
        assert self._current is not None
        self._current.save()

    def _switch_off_failed(self, owner: str, run: Run, event: Event, error: BaseException) -> bool:
        if owner not in self._names or BaseExceptionGroup("", [error]).subgroup(KeyboardInterrupt):
            return False
        if isinstance(error, NotRecorded):
            self._switch_off(str(owner), error, event.name)
            return True
        if self._forgive_observer is not None and self._forgive_observer(owner, run, event, error):
            return True
        if not isinstance(error, Exception):
            return False
        assert self._current is not None
        progress, text = self._current.run.progress, describe_error(error)
        self._findings.failed[str(owner)][f"{text} ({self._position(event.name)})"] = None
        place = (progress.epoch, progress.batch, progress.steps)
        did = self._current.fails_next
        self._findings.add_end(str(owner), f"{text} on {event.name}", place, did=did, failure=True)
        self._switches.set(str(owner), "failed", off=True)
        return True

    def _switch_off(self, name: str, error: NotRecorded, event: str) -> None:
        self._findings.unheld[name][f"{error} ({self._position(event)})"] = None
        self._switches.set(name, "unheld", off=True)

    def _position(self, event: str) -> str:
        assert self._current is not None
        progress = self._current.run.progress
        on = f"{event}, " if event else ""
        return f"{on}attempt {self._attempt}, epoch {progress.epoch} batch {progress.batch} step {progress.steps}"


def _describe_attempt(number: int, attempt: AttemptRecord, names: Iterable[str]) -> RecordedAttempt:
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
