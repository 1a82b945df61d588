"""Replay plugins with a recorded run, and report their requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from heliograph import Bus, GradientsReady, Lane, NotRecorded, Plugins, Progress, Run, SavePoint, StepEnd
from heliograph.events import Event, Request
from heliograph.spi import describe_error

from ..explain.attempt_summary import AttemptSummary, summarize_attempts
from ..explain.requests import requests_of
from ..format.reader import damage_in_short, read
from ..format.records import AttemptRecord, EventEntry, Recording
from .attempt import AttemptReplay
from .report import RecordedAttempt, Replayed, ReplayedRequest, ReplayEnding
from .run import ReplayRun

OffReason = Literal["unheld", "failed", "disabled"]


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


class Switches:
    """The reasons why a replayed plugin is switched off; it is on without a reason."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._off: dict[str, set[OffReason]] = {name: set() for name in plugins.names()}
        self._enabled_at_first = {name for name in plugins.names() if plugins.is_enabled(name)}

    def switch(self, name: str, reason: OffReason, *, off: bool) -> None:
        reasons = self._off[name]
        before = bool(reasons)
        (reasons.add if off else reasons.discard)(reason)
        if reasons and not before:
            self._plugins.disable(name)
        elif before and not reasons and name in self._enabled_at_first:
            self._plugins.enable(name)

    def begin(self, attempt: AttemptRecord) -> None:
        """Begin an attempt: all are on, except plugins that the recorded attempt enabled later."""
        first_changes: dict[str, str] = {}
        for entry in attempt.entries:
            if isinstance(entry, EventEntry) and entry.event == "plugin_changed":
                first_changes.setdefault(entry.data["plugin"], entry.data["change"])
        for name in self._off:
            self.switch(name, "disabled", off=first_changes.get(name) in ("enabled", "registered"))
            self.clear_errors(name)

    def clear_errors(self, name: str) -> None:
        self.switch(name, "unheld", off=False)
        self.switch(name, "failed", off=False)

    def broken(self) -> set[str]:
        return {name for name, reasons in self._off.items() if not reasons.isdisjoint(("unheld", "failed"))}


@dataclass(slots=True)
class Snapshot:
    """The states at one save.

    Attributes:
        plugins: the states of the plugins.
        filters: the states of their handlers' filters.
        control: the pending requests.
        metrics: the latest value of every metric.
        is_last_seen: whether an epoch of unknown length was at its last batch.
        broken: the plugins that had an error before, so that their states are invalid.
    """

    plugins: dict[str, Any]
    filters: dict[str, Any]
    control: dict[str, Any]
    metrics: dict[str, float]
    is_last_seen: bool
    broken: set[str]


class ReplaySession:
    """One replay of a recording with plugins.

    Attributes:
        recording: the recording.
        bus: the bus of the replayed plugins.
        names: their names.
        number: the number of the current attempt.
        switches: of the plugins.
        best: the best checkpoint.
        unwritten: the number of saves whose checkpoint was not written yet.
    """

    def __init__(self, recording: Recording, plugins: Iterable[Any]) -> None:
        self.recording, self.bus = recording, Bus()
        self._plugins = Plugins(self.bus)
        self._forgive_observer = self.bus.forgiver
        self.bus.forgiver = self._switch_off_failed
        for plugin in plugins:
            self._plugins.register(plugin)
        self.bus.on(SavePoint, self._save, lane=Lane.PERSIST)  # where checkpoints are written
        self.names = self._plugins.names()
        self.number, self.switches = 0, Switches(self._plugins)
        summaries = summarize_attempts(recording) if recording.attempts else []
        recorded = [_describe(summary, self.names) for summary in summaries]
        self._replayed = Replayed(recording.path, tuple(self.names), recorded=recorded)
        self._has_diverged = False  # the run would have ended before the current position
        self._ids = set[int]()  # of the requests
        self.best: Path | None = None
        self.unwritten = 0
        self._snapshots: dict[str, Snapshot] = {}  # by place; a later save at the same place replaces an earlier one
        self._length: int | None = None
        self._current: AttemptReplay

    def replay(self) -> Replayed:
        for self.number, attempt in enumerate(self.recording.attempts, 1):
            for text in damage_in_short(attempt):
                self.note(f"attempt {self.number} is damaged: {text}")
            self._replay_attempt(attempt)
        if not self.recording.attempts:
            self.note("nothing is recorded: the run was killed before it started")
        return self._replayed

    def add_request(self, request: Request) -> None:
        """Add a request; a repeated request is listed once."""
        if id(request) not in self._ids:
            self._ids.add(id(request))
            self._replayed.asked.append(ReplayedRequest(self.number, request, self._has_diverged))

    def add_end(self, by: str, reason: str, at: Progress, *, did: bool | None, failure: bool = False) -> None:
        ends = self._replayed.ends
        if not self._has_diverged and all(end.attempt != self.number for end in ends):
            ends.append(ReplayEnding(self.number, by, reason, failure, at.epoch, at.batch, at.steps, did))
        self._has_diverged = self._has_diverged or did is False

    def note(self, text: str) -> None:
        _add_once(self._replayed.notes, text)

    def _replay_attempt(self, attempt: AttemptRecord) -> None:
        self._current = AttemptReplay(self, attempt)
        run = self._current.run
        self.switches.begin(attempt)
        self._plugins.open(run)
        try:
            if attempt.phase == "train":
                self._plugins.reset()
            if run.is_named:
                for name in self._plugins_on_steps():
                    self._switch_off(name, NotRecorded("the order in which several optimizers were stepped"), "")
            self._current.replay(self._length)
        finally:
            for name, error in self._plugins.close():
                text = f"{describe_error(error)} (on close, attempt {self.number})"
                _add_once(self._replayed.failed.setdefault(name, []), text)
        self._length = run.batches_per_epoch
        for note in (*run.notes, *(f"WARNING: {warning}" for warning in run.warnings)):
            self.note(note)
        self.unwritten = 0

    def _plugins_on_steps(self) -> set[str]:
        """Return the plugins with handlers of single optimizer steps."""
        signals = self.bus.signal(GradientsReady), self.bus.signal(StepEnd)
        owners = {str(subscription.owner) for signal in signals for subscription in signal.subscriptions.values()}
        return owners & set(self.names)

    # Saved states.

    def _save(self, run: Run, event: SavePoint) -> None:
        self._current.save()

    def take_snapshot(self, run: ReplayRun) -> None:
        plugins = self._plugins
        self._snapshots[_place(run.progress)] = Snapshot(
            plugins.state_dict(),
            plugins.filter_states(run.origin),
            run.control.state_dict(),
            dict(run.metrics),
            run.is_last_seen,
            self.switches.broken(),
        )
        self.unwritten += 1

    def restore_snapshot(self, run: ReplayRun, *, rolls_back: bool) -> bool:
        """Restore the save at the run's new origin; return False if it is not recorded."""
        snapshot = self._snapshots.get(_place(run.progress))
        if snapshot is None:
            self._plugins.load_filter_states(run.origin, {})
            return False
        run.control.load_state_dict(snapshot.control, at_save_point=run.in_boundary)
        run.metrics.update(snapshot.metrics)
        run.is_last_seen = snapshot.is_last_seen
        for name in self.names:
            if name in snapshot.broken:
                self.switches.switch(name, "unheld", off=True)
            elif rolls_back:
                self.switches.clear_errors(name)  # the error may be later than the snapshot
        self._plugins.load_state_dict(snapshot.plugins, goes_back=rolls_back)
        self._plugins.load_filter_states(run.origin, snapshot.filters)
        return True

    # Errors.

    def _switch_off_failed(self, owner: str, run: Run, event: Event, error: BaseException) -> bool:
        if owner not in self.names or BaseExceptionGroup("", [error]).subgroup(KeyboardInterrupt):
            return False
        if isinstance(error, NotRecorded):
            self._switch_off(str(owner), error, event.name)
            return True
        if self._forgive_observer is not None and self._forgive_observer(owner, run, event, error):
            return True
        if not isinstance(error, Exception):
            return False
        text = describe_error(error)
        _add_once(self._replayed.failed.setdefault(str(owner), []), f"{text} ({self._position(event.name)})")
        did = self._current.fails_next
        self.add_end(str(owner), f"{text} on {event.name}", run.progress, did=did, failure=True)
        self.switches.switch(str(owner), "failed", off=True)
        return True

    def _switch_off(self, name: str, error: NotRecorded, event: str) -> None:
        _add_once(self._replayed.unheld.setdefault(name, []), f"{error} ({self._position(event)})")
        self.switches.switch(name, "unheld", off=True)

    def _position(self, event: str) -> str:
        at, on = self._current.run.progress, f"{event}, " if event else ""
        return f"{on}attempt {self.number}, epoch {at.epoch} batch {at.batch} step {at.steps}"


def _place(progress: Progress) -> str:
    return repr({**progress.state_dict(), "earlier_seconds": 0})


def _add_once(texts: list[str], text: str) -> None:
    if text not in texts:
        texts.append(text)


def _describe(summary: AttemptSummary, names: Iterable[str]) -> RecordedAttempt:
    at, reason = summary.last, "" if summary.ending is None else str(summary.ending.data["reason"])
    requests = tuple(outcome.request for outcome in requests_of(summary) if outcome.request.by in names)
    return RecordedAttempt(summary.number, summary.attempt.status, reason, at.epoch, at.batch, at.steps, requests)
