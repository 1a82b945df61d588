"""Drive plugins with a recorded run, and report what they would have asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....core.errors import NotRecorded
from ....events import Bus, Event, Lane, Request, Run, SavePoint
from ....events.errors import describe_error, is_interrupt
from ....plugins import Plugins
from ..format.damage import damage_in_short
from ..format.reader import read
from ..format.records import Attempt, Batches, Counters, EventEntry, Recording, RepeatEntry, RequestEntry
from .ledger import Ledger
from .loop import AttemptReplay, hearers_of_steps
from .report import Recorded, Replayed
from .snapshots import Snapshots
from .switches import Switches


def replay(recording: str | Path | Recording, plugins: Iterable[Any]) -> Replayed:
    """Drive plugins with a recorded run, without its model and data, and return what they would have asked.

    The recorded run goes on as it did, whatever the plugins ask: the report says what of it the run did too, and where
    it would have ended. The plugins are on their own, as in a trainer that holds no others; what plugins of other names
    had asked in the run stands in `run.control`. Where the run was resumed or went back, they go on from what a
    checkpoint would have held of them: all of them, as if they had been in the run all along.

    A plugin that needs what no recording holds, such as the model, is told so and switched off from there on. One that
    raises an error would have failed the run, and hears nothing more of that attempt.

    Args:
        recording: the file that `Recorder` wrote, a folder of such files (the newest is taken), or one that was read.
        plugins: plugin objects, in their order; each takes the place of the one of its name in the run.

    Raises:
        FileNotFoundError: there is no recording.
        ValueError: it is none, or of a newer format; plugins contradict each other.
        TypeError: the recording is no path, a plugin is none, or a handler does not fit its event.
    """
    held = recording if isinstance(recording, Recording) else read(recording)
    return Session(held, plugins).play()


class Session:
    """One replay.

    Args:
        recording: of what.
        plugins: who is replayed.
    """

    def __init__(self, recording: Recording, plugins: Iterable[Any]) -> None:
        self._recording, self._bus = recording, Bus()
        self._plugins = Plugins(self._bus)
        self._observed = self._bus.forgiver
        self._bus.forgiver = self._forgive
        if not isinstance(plugins, Iterable):
            raise TypeError(f"replay takes a list of plugin objects: plugins=[{type(plugins).__name__}(...)].")
        for plugin in plugins:
            self._plugins.register(plugin)
        self._bus.on(SavePoint, self._take, lane=Lane.PERSIST)  # where checkpoints are written
        self._names = self._plugins.names()
        self._ledger, self._switches = Ledger(), Switches(self._plugins)
        self._snapshots = Snapshots(self._plugins, self._switches)
        self._attempt = 0
        self._length: int | None = None
        self._replay: AttemptReplay | None = None

    def play(self) -> Replayed:
        """Replay all attempts and return the report."""
        attempts, ledger = self._recording.attempts, self._ledger
        known = {name for attempt in attempts for names in attempt.plan.values() for name in names}
        for self._attempt, attempt in enumerate(attempts, 1):
            ledger.begin(self._attempt)
            for text in damage_in_short(attempt):
                ledger.note(f"attempt {self._attempt} is damaged: {text}")
            self._play(attempt, known)
        if not attempts:
            ledger.note("nothing is recorded: the run was killed before it began")
        return Replayed(
            recording=self._recording.path,
            plugins=tuple(self._names),
            asked=ledger.asked(),
            recorded=tuple(recorded(number, each, self._names) for number, each in enumerate(attempts, 1)),
            ends=tuple(ledger.ends),
            unheld={name: tuple(texts) for name, texts in ledger.unheld.items()},
            failed={name: tuple(texts) for name, texts in ledger.failed.items()},
            notes=tuple(ledger.notes),
        )

    def _play(self, attempt: Attempt, known: set[str]) -> None:
        self._replay = AttemptReplay(
            self._attempt,
            attempt,
            self._recording.path,
            self._bus,
            self._names,
            self._switches,
            self._snapshots,
            self._ledger,
        )
        run = self._replay.run
        self._switches.begin(attempt, known)
        self._plugins.open(run)
        if attempt.phase == "train":
            self._plugins.reset()
        if run.several:
            for name in hearers_of_steps(self._bus) & set(self._names):
                self._tell(name, NotRecorded("the order in which several optimizers were stepped"), "")
        try:
            self._replay.play(self._length)
        finally:
            for name, error in self._plugins.close():
                self._ledger.fail(name, f"{describe_error(error)} (on close, attempt {self._attempt})")
        self._length = run.batches_per_epoch
        for note in run.notes:
            self._ledger.note(note)
        self._snapshots.forget_untold()

    def _take(self, run: Run, event: SavePoint) -> None:
        assert self._replay is not None
        self._replay.save()

    def _forgive(self, owner: str, run: Run, event: Event, error: BaseException) -> bool:
        """Switch off a plugin whose handler cannot go on; the others do."""
        if owner not in self._names or is_interrupt(error):
            return False
        if isinstance(error, NotRecorded):
            self._tell(str(owner), error, event.name)
            return True
        if self._observed is not None and self._observed(owner, run, event, error):
            return True
        if not isinstance(error, Exception):
            return False
        where = self._place(event.name)
        self._ledger.fail(str(owner), f"{describe_error(error)} ({where})")
        self._note_failure(str(owner), event, error)
        self._switches.set(str(owner), "failed", off=True)
        return True

    def _tell(self, name: str, error: NotRecorded, event: str) -> None:
        self._ledger.tell(name, f"{error} ({self._place(event)})")
        self._switches.set(name, "unheld", off=True)

    def _note_failure(self, name: str, event: Event, error: Exception) -> None:
        """Note that the run would have failed here."""
        assert self._replay is not None
        place = self._replay.run.progress
        did = self._replay.fails_by(name, event.name)
        where = (place.epoch, place.batch, place.steps)
        self._ledger.end(name, f"{describe_error(error)} on {event.name}", where, did=did, failure=True)

    def _place(self, event: str) -> str:
        assert self._replay is not None
        place = self._replay.run.progress
        on = f"{event}, " if event else ""
        return f"{on}attempt {self._attempt}, epoch {place.epoch} batch {place.batch} step {place.steps}"


def recorded(number: int, attempt: Attempt, names: Iterable[str]) -> Recorded:
    """Return what a recording shows of an attempt, with the requests of the plugins of these names."""
    asked: dict[int, Request] = {}
    place, reason = Counters(), ""
    for entry in attempt.entries:
        if isinstance(entry, RequestEntry) and entry.request.by in names:
            asked[entry.number] = replace(entry.request)
        elif isinstance(entry, RepeatEntry) and entry.number in asked:
            asked[entry.number].times = entry.times
        elif isinstance(entry, EventEntry):
            place, reason = entry.counters, str(entry.data.get("reason", "")) if entry.event == "run_closed" else ""
        elif isinstance(entry, Batches):
            place = entry.last
    return Recorded(number, attempt.status, reason, place.epoch, place.batch, place.steps, tuple(asked.values()))
