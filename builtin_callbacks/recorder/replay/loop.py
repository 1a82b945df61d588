"""The loop of a replay: every recorded entry, in the order in which it came about, does what it did to the run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ....events import Bus, Event, GradientsReady, StepEnd
from ..format.records import Attempt, Batches, Counters, Entry, EventEntry, RepeatEntry, RequestEntry
from .batches import BatchReplay
from .boundary import Boundary
from .evaluations import Evaluations
from .events import made
from .failure import Failing
from .ledger import Ledger
from .requests import Requests
from .run import ReplayRun
from .script import MARCHING, Script
from .snapshots import Snapshots
from .switches import Switches

ANYWHERE = (
    "plugin_changed",
    "plugin_failed",
    "checkpoint_saved",
    "checkpoint_pruned",
    "resume_verified",
)  # even amid a batch
SERVES: dict[str, Any] = {"log": "log", "validation_start": "validation", "save_point": "save"}


class AttemptReplay:
    """The replay of one attempt.

    Args:
        number: which one, from 1.
        attempt: what is replayed.
        path: the recording.
        bus: the replay's.
        replayed: the names of the replayed plugins.
        switches: which of them are on.
        snapshots: what checkpoints hold of them.
        ledger: where to write down what they ask.

    Attributes:
        run: what the plugins are given.
    """

    def __init__(
        self,
        number: int,
        attempt: Attempt,
        path: Path,
        bus: Bus,
        replayed: Collection[str],
        switches: Switches,
        snapshots: Snapshots,
        ledger: Ledger,
    ) -> None:
        self._number, self._attempt, self._replayed = number, attempt, replayed
        self._switches, self._snapshots, self._ledger = switches, snapshots, ledger
        self._script = Script(attempt)
        self.run = ReplayRun(attempt, path, bus, ledger.hear, self._script.goes_back)
        self._requests = Requests(attempt, self._script, self.run, replayed)
        self._failing = Failing(attempt, bus, self._script)
        self._boundary = Boundary(self.run, self._requests, ledger, self._failing)
        self._batches = BatchReplay(
            attempt, self.run, self._script, self._requests, self._boundary, ledger, self._failing
        )
        self._evaluations = Evaluations(
            attempt, self.run, self._requests, self._failing, ledger, self._tell, self._tell_metrics
        )
        self._went_on = False  # behind the state that it was to resume, if any
        self._acts: dict[str, Callable[[EventEntry], None]] = {
            "train_start": self._start,
            "checkpoint_loaded": self._load,
            "epoch_start": self._start_epoch,
            "epoch_end": self._end_epoch,
            "train_end": self._end_training,
            "log": self._log,
            "validation_start": self._evaluations.start,
            "test_start": self._evaluations.start,
            "validation_end": self._evaluations.end,
            "test_end": self._evaluations.end,
            "validation_cut": self._evaluations.cut,
            "checkpoint_saved": self._save,
            "plugin_changed": self._change_plugin,
            "run_failed": self._fail,
        }

    def fails_by(self, plugin: str, event: str) -> bool:
        """Return whether the recorded run fails here by the same plugin, on the same event."""
        return self._failing.is_by(plugin, event)

    def play(self, length: int | None) -> None:
        """Replay it all.

        Args:
            length: of the epochs of the attempt before, in batches, in case that this one has none.
        """
        self.run.batches_per_epoch = self._script.next_length(length)
        while (entry := self._script.next()) is not None:
            self._play(entry)
        self._boundary.close(None)
        self._ledger.close(was_killed=self._attempt.status is None)

    def save(self) -> None:
        """Amid a `SavePoint`, keep what a checkpoint holds; tell of what was written then."""
        while self._snapshots.wait and (entry := self._script.next_nested()) is not None:
            self._play(entry)  # a save that was still under way
        self._snapshots.take(self.run)
        while (entry := self._script.next_nested()) is not None:
            self._play(entry)

    def _play(self, entry: Entry) -> None:
        match entry:
            case EventEntry():
                self._happen(entry)
            case Batches():
                self._boundary.close(entry)
                self._check_gap(entry.first)
                self._batches.replay(entry)
            case RequestEntry():
                self._requests.meet(entry)
            case RepeatEntry():
                self._requests.count(entry)

    def _happen(self, entry: EventEntry) -> None:
        if entry.event in MARCHING:
            self._boundary.close(entry)
            if entry.event != "checkpoint_loaded":
                self._check_gap(entry.counters)
        if entry.event in SERVES:
            self._boundary.serve(SERVES[entry.event])
        self._acts.get(entry.event, self._tell)(entry)

    def _tell(self, entry: EventEntry) -> Event | None:
        """Emit an entry's event where it was."""
        event = made(entry)
        if event is None or entry.event in ANYWHERE:  # the counters of a batch under way are not told of yet
            self.run.progress.set_seconds(entry.counters.seconds)
        else:
            self.run.move(entry.counters)
        if event is None:  # of somebody's own: nobody knows its class
            return None
        self._requests.bring(event.name)
        with self._failing.heard(type(event)):
            self.run.emit(event)
        return event

    def _start(self, entry: EventEntry) -> None:
        self.run.started = True
        self._tell(entry)
        if self._script.following() != "checkpoint_loaded":
            self._arrive()

    def _arrive(self, *, in_boundary: bool = False) -> None:
        """Stand where the run begins or goes on, before an epoch does."""
        self._went_on = True
        self._boundary.open(due=in_boundary or self.run.control.pending or self._is_shared)

    @property
    def _is_shared(self) -> bool:
        return self._attempt.world_size > 1

    def _load(self, entry: EventEntry) -> None:
        """Go on from a checkpoint: what the run resumes, or goes back to."""
        run, path, origin = self.run, entry.data["path"], Counters(**entry.data["origin"])
        if amid := self._went_on:
            self._give_up_epoch()
        run.begin_from(origin)
        run.in_boundary = entry.data.get("in_boundary", False)
        snapshot = self._snapshots.find(path, run.progress.state_dict())
        if snapshot is None:
            self._ledger.note(
                f"attempt {self._number} went on from {path or 'a state'}, of whose making the recording tells "
                f"nothing: there the replayed plugins began afresh"
            )
            self._snapshots.begin_afresh(run.origin)
        else:
            self._snapshots.give_back(snapshot, run, amid=amid)
        run.last_checkpoint = None if path is None else Path(path)
        run.best_checkpoint = self._snapshots.best
        self._tell(entry)
        self._arrive(in_boundary=run.in_boundary)

    def _give_up_epoch(self) -> None:
        run = self.run
        run.control.discard_epoch()
        self._ledger.settle("roll_back", did=True)
        for verb in ("log", "validation", "save", "end_epoch"):
            self._ledger.settle(verb, did=False)
        run.window, run.loss, run.last_seen = 0, None, False
        run.metrics.clear()

    def _start_epoch(self, entry: EventEntry) -> None:
        self.run.batches_per_epoch = entry.data["batches"]
        self._tell(entry)
        if not entry.data["resumed"]:
            self._boundary.open(due=self.run.control.pending or self._is_shared)

    def _leave_epoch(self, place: Counters) -> None:
        """Step with the gradients that an epoch's last batch left, as the loop does."""
        run = self.run
        if run.window and place.steps + place.skipped_steps > run.progress.steps + run.progress.skipped_steps:
            self._batches.close_window(place.steps, place.skipped_steps)
            run.control.close_batch()
        run.loss = None

    def _end_epoch(self, entry: EventEntry) -> None:
        self._leave_epoch(entry.counters)
        self.run.control.close_epoch()
        self._ledger.settle("end_epoch", did=True)
        self.run.window, self.run.last_seen = 0, False
        self.run.batches_per_epoch = self._script.next_length(self.run.batches_per_epoch)
        self._tell(entry)
        self._boundary.open(due=True)

    def _end_training(self, entry: EventEntry) -> None:
        self._leave_epoch(entry.counters)
        control = self.run.control
        if self._attempt.status == "stopped" and not control.stopped:
            self._ledger.note(
                f"attempt {self._number} was stopped at epoch {entry.counters.epoch} batch {entry.counters.batch} step "
                f"{entry.counters.steps}, which with the replayed plugins it would not have been: what would have "
                f"followed is not recorded"
            )
        self.run.finished = True
        self._tell(entry)
        self._boundary.open(due=True, last=True)

    def _log(self, entry: EventEntry) -> None:
        metrics = entry.data["metrics"]
        for name, optimizer in self.run.optimizers.items():
            optimizer.group.rate = metrics.get(f"train/{self.run.label('learning_rate', name)}")
        self._tell_metrics(entry)
        for optimizer in self.run.optimizers.values():
            optimizer.group.rate = None

    def _tell_metrics(self, entry: EventEntry) -> None:
        event: Any = self._tell(entry)
        if not self._failing.is_on(entry.event):
            self.run.metrics.update(event.metrics)

    def _save(self, entry: EventEntry) -> None:
        path = Path(entry.data["path"])
        self.run.last_checkpoint = path
        if entry.data["is_best"]:
            self.run.best_checkpoint = path
        self._snapshots.tell(str(path), is_best=entry.data["is_best"])
        self._tell(entry)

    def _change_plugin(self, entry: EventEntry) -> None:
        name = entry.data["plugin"]
        if name in self._replayed:
            self.run.progress.set_seconds(entry.counters.seconds)
            self._switches.follow(name, entry.data["change"])
        else:
            self._tell(entry)

    def _fail(self, entry: EventEntry) -> None:
        self._failing.replay_last_batch(entry, self.run, self._requests)
        self._evaluations.fail(entry)
        self.run.phase = entry.data["phase"]
        self._tell(entry)

    def _check_gap(self, place: Counters) -> None:
        """Go to a place, if batches before it are not recorded."""
        if place.batches != self.run.progress.batches:
            self._ledger.note(
                f"attempt {self._number}: not every batch before epoch {place.epoch} batch {place.batch} is recorded"
            )
            self.run.move(place)


def hearers_of_steps(bus: Bus) -> set[str]:
    """Return who hears of single optimizer steps."""
    return {str(seat.owner) for event in (GradientsReady, StepEnd) for seat in bus.signal(event).subscriptions.values()}
