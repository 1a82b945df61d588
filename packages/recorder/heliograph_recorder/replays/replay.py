"""Replay plugins with a recorded run, and report their requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heliograph import Bus, Lane, NotRecorded, Plugins, Progress, Run, SavePoint
from heliograph.events import Event, Request
from heliograph.spi import describe_error

from ..explain.attempt_summary import summarize_attempts
from ..format.reader import damage_in_short, read
from ..format.records import AttemptRecord, Recording
from .attempt import AttemptReplay
from .report import Replayed, ReplayedRequest, ReplayEnding
from .run import ReplayRun


def replay(recording: str | Path | Recording, plugins: Iterable[Any]) -> Replayed:
    """Run plugins against a recorded run, without its model and data, and return their requests.

    The requests of the plugins do not change the recorded run. The result shows for each request whether the recorded
    run did the same, and where a plugin would have ended the run. No other plugins run, but their recorded requests are
    in `run.control`, added before the handlers of the event in which they were made. If the run was resumed or rolled
    back, all replayed plugins continue from the state that the checkpoint would have contained, as if they had been in
    the run from the start.

    A plugin that needs unrecorded data, such as the model, gets `NotRecorded` and is switched off for the rest of the
    replay. A plugin that raises another error would have failed the run, and is switched off until the next attempt.
    Functions that a plugin passes to `run.hooks` are not called, because no process ends with the replay.

    Args:
        recording: the file that `Recorder` wrote, a folder of recordings (the newest is read), or a `Recording`.
        plugins: the plugin objects in their order; they replace the plugins of the same names in the run.

    Raises:
        FileNotFoundError: there is no recording.
        ValueError: the file is not a recording, or of another format; lines between its entries are damaged; a plugin
            handles steps, and the run has several optimizers; or plugins contradict each other.
        TypeError: the recording is not a path, an object is not a plugin, or a handler does not fit its event.
    """
    source = recording if isinstance(recording, Recording) else read(recording)
    return ReplaySession(source, plugins).replay()


@dataclass(slots=True)
class Snapshot:
    """The states at one save.

    Attributes:
        plugins: the states of the plugins.
        filters: the states of their handlers' filters.
        control: the pending requests.
        metrics: the latest value of every metric.
    """

    plugins: dict[str, Any]
    filters: dict[str, Any]
    control: dict[str, Any]
    metrics: dict[str, float]


class ReplaySession:
    """One replay of a recording with plugins.

    Attributes:
        recording: the recording.
        bus: the bus of the replayed plugins.
        names: their names.
        number: the number of the current attempt.
        best: the best checkpoint.
    """

    def __init__(self, recording: Recording, plugins: Iterable[Any]) -> None:
        self.recording, self.bus = recording, Bus()
        self._plugins = Plugins(self.bus)
        self._forgive_observer = self.bus.forgiver
        self.bus.forgiver = self._switch_off
        for plugin in plugins:
            self._plugins.register(plugin)
        self.bus.on(SavePoint, self._save, lane=Lane.PERSIST)  # where checkpoints are written
        self.names = self._plugins.names()
        self.number = 0
        recorded = summarize_attempts(recording) if recording.attempts else []
        self._replayed = Replayed(recording.path, tuple(self.names), recorded=recorded)
        self._has_diverged = False  # the run would have ended before the current position
        self._disabled = set[str]()  # in the recorded run
        self._failed = set[str]()
        self.best: Path | None = None
        self._snapshots: dict[str, Snapshot] = {}  # by place; a later save at the same place replaces an earlier one
        self._current: AttemptReplay

    def replay(self) -> Replayed:
        for self.number, attempt in enumerate(self.recording.attempts, 1):
            if attempt.has_gap:
                raise ValueError(
                    f"Attempt {self.number} of {self.recording.path} has damaged lines between its entries "
                    f"({attempt.damage[0]}), but a replay needs every entry. `explain` reads what is left."
                )
            for text in damage_in_short(attempt):
                self.note(f"attempt {self.number} is damaged: {text}")
            self._replay_attempt(attempt)
        if not self.recording.attempts:
            self.note("nothing is recorded: the run was killed before it started")
        return self._replayed

    def add_request(self, request: Request) -> None:
        """Add a request if it is of a replayed plugin."""
        if request.by in self.names or request.through in self.names:
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
        switched_off = self._disabled | self._failed
        self._disabled.clear()
        self._failed.clear()
        for name in switched_off:
            self._update(name)
        self._plugins.open(run)
        try:
            if attempt.phase == "train":
                self._plugins.reset()
            self._current.replay()
        finally:
            for name, error in self._plugins.close():
                text = f"{describe_error(error)} (on close, attempt {self.number})"
                _add_once(self._replayed.failed.setdefault(name, []), text)
        for note in (*run.notes, *(f"WARNING: {warning}" for warning in run.warnings)):
            self.note(note)

    # Saved states.

    def _save(self, run: ReplayRun, event: SavePoint) -> None:
        plugins = self._plugins
        self._snapshots[_place(run.progress)] = Snapshot(
            plugins.state_dict(),
            plugins.filter_states(run.origin),
            run.control.state_dict(),
            dict(run.metrics),
        )
        self._current.replay_save()

    def restore_snapshot(self, run: ReplayRun, *, rolls_back: bool) -> bool:
        """Restore the save at the run's new origin; return False if it is not recorded."""
        snapshot = self._snapshots.get(_place(run.progress))
        if snapshot is None:
            self._plugins.load_filter_states(run.origin, {})
            return False
        run.control.load_state_dict(snapshot.control, at_save_point=run.in_boundary)
        run.metrics.update(snapshot.metrics)
        self._plugins.load_state_dict(snapshot.plugins, goes_back=rolls_back)
        self._plugins.load_filter_states(run.origin, snapshot.filters)
        return True

    # Plugins that are switched off.

    def toggle(self, name: str, *, on: bool) -> None:
        """Enable or disable a plugin as in the recorded run."""
        (self._disabled.discard if on else self._disabled.add)(name)
        self._update(name)

    def _update(self, name: str) -> None:
        if name in self._disabled or name in self._failed or name in self._replayed.unheld:
            self._plugins.disable(name)
        else:
            self._plugins.enable(name)

    def _switch_off(self, owner: str, run: Run, event: Event, error: BaseException) -> bool:
        """Switch off a plugin whose handler failed; return False if the error ends the replay."""
        if owner not in self.names or not isinstance(error, Exception):
            return False
        name, at = str(owner), run.progress
        place = f"{event.name}, attempt {self.number}, epoch {at.epoch} batch {at.batch} step {at.steps}"
        if isinstance(error, NotRecorded):
            _add_once(self._replayed.unheld.setdefault(name, []), f"{error} ({place})")
        elif self._forgive_observer is not None and self._forgive_observer(owner, run, event, error):
            return True
        else:
            text = describe_error(error)
            _add_once(self._replayed.failed.setdefault(name, []), f"{text} ({place})")
            self.add_end(name, f"{text} on {event.name}", at, did=self._current.fails_next, failure=True)
            self._failed.add(name)
        self._update(name)
        return True


def _place(progress: Progress) -> str:
    return repr({**progress.state_dict(), "earlier_seconds": 0})


def _add_once(texts: list[str], text: str) -> None:
    if text not in texts:
        texts.append(text)
