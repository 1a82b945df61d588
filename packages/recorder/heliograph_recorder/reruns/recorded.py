"""A recorded run, and the checkpoints of it that are still there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from heliograph.spi import Store, check_whole_number, membership

from ..divergence.course import Begin, Course, course_of
from ..format.reader import read
from ..format.records import Counters, EventEntry, Recording, walk
from .change import GIVE, Change, RecordedChange, RepeatedChange, parent_of, recorded_change
from .errors import NotExact
from .requests import PersonRequest, requests_of_people

SILENT = (
    "the recording has neither digests nor losses, so what is done again is compared by its counters, requests and "
    "metrics only: Recorder(digests=True) records digests"
)
NOTED = ("checkpoint_saved", "checkpoint_loaded")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run is continued from.

    Attributes:
        path: the checkpoint, None for the beginning.
        step: the optimizer steps that were done there.
        place: the epoch, and the batches of it that were done there.
        skipped: newer checkpoints that cannot be used, and why.
    """

    path: Path | None = None
    step: int = 0
    place: tuple[int, int] = 0, 0
    skipped: list[str] = field(default_factory=list)

    @property
    def begin(self) -> Begin | None:
        """Where the course of what is continued begins; None at the start."""
        return None if self.path is None else (*self.place, self.step)


class RecordedRun:
    """A recorded training.

    Args:
        path: its recording, or its folder: the newest recording there.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read, or is of no training.
    """

    def __init__(self, path: str | Path) -> None:
        self._folder = Path(path) if Path(path).is_dir() else Path(path).parent
        self.recording: Recording = read(path)
        self.whole = course_of(self.recording, str(self.recording.path))

    @property
    def steps(self) -> int:
        """How many optimizer steps are recorded."""
        return max((moment.step for moment in self.whole.moments), default=0)

    @property
    def newest_step(self) -> int:
        """The optimizer step of the newest checkpoint that can be read.

        Raises:
            ValueError: there is none.
        """
        origin = self.origin(self.steps)
        if origin.path is None:
            why = f": {'; '.join(each.rstrip('.') for each in origin.skipped)}" if origin.skipped else ""
            raise ValueError(
                f"{self.recording.path} has no checkpoint that could be continued{why}. Give at= (--at on the command "
                f"line): steps since the beginning are done again."
            )
        return origin.step

    @property
    def change(self) -> RecordedChange | None:
        """The change with which this run left its parent; None where it is no fork, or was not changed."""
        return recorded_change(next(each for each in self.recording.attempts if each.phase == "train"))

    @contextmanager
    def naming_ranks(self) -> Iterator[None]:
        """Let NotExact name the numbers of ranks where the program fails with another one than was recorded."""
        recorded = [each.world_size for each in self.recording.attempts if each.phase == "train"]
        try:
            yield
        except ValueError as error:
            if (present := membership().world_size) in recorded:
                raise
            numbers = f"it was recorded with {_ranks(recorded[-1])}, and is done again with {_ranks(present)}"
            start = f"start as many as were recorded, as with torchrun --nproc-per-node={recorded[-1]}"
            raise NotExact((f"{numbers}: {start}", str(error))) from error

    def requests_after(self, origin: Origin) -> list[PersonRequest]:
        """Return what people requested from an origin on."""
        return requests_of_people(self.recording, origin.begin)

    def repeated_change(
        self, origin: Origin, change: Change | None, *, exact: bool, mend: str = GIVE
    ) -> RepeatedChange | None:
        """Return what makes the change of this fork again; None where there is none after an origin.

        Raises:
            ValueError: a change is given, and the run is no fork with one.
            NotExact: another function is given than the one that made it, and that is to be exact.
        """
        recorded = self.change
        if recorded is None and change is not None:
            raise ValueError(f"{self.recording.path} is no fork that was changed, so there is no change to make again.")
        if recorded is None or not recorded.is_after(origin.place, origin.step):
            return None
        return RepeatedChange(recorded, change, exact=exact, mend=mend)

    def silence(self, origin: Origin) -> list[str]:
        """Return a sentence where nothing after an origin is recorded by which a batch could be compared."""
        course = self.course_after(origin)
        return [] if course.digests or course.losses else [SILENT]

    def check_step(self, step: int, least: int) -> int:
        """Return a step, if it is recorded.

        Args:
            step: the step.
            least: what it is at least: 1 where it is to be done again, 0 where the training continues after it.

        Raises:
            ValueError: it is not.
        """
        number = check_whole_number("step", step, at_least=least)
        begin = self.whole.begin[2]
        if number - least < begin:
            parent = parent_of(next(each for each in self.recording.attempts if each.phase == "train"))
            where = "it does not have earlier ones" if parent is None else f"earlier steps are in {parent[0]}"
            raise ValueError(f"{self.recording.path} begins after step {begin}: {where}.")
        if number > self.steps:
            raise ValueError(f"{self.recording.path} ends after step {self.steps}: there is no step {number}.")
        return number

    def origin(self, step: int) -> Origin:
        """Return the newest checkpoint that was written after at most so many steps and can be read."""
        return self._newest(lambda counters: counters.steps <= step)

    def origin_before(self, epoch: int, batch: int) -> Origin:
        """Return the newest checkpoint that was written before a batch of an epoch and can be read."""
        return self._newest(lambda counters: (counters.epoch, counters.batch) < (epoch, batch))

    def _newest(self, fits: Callable[[Counters], bool]) -> Origin:
        skipped: list[str] = []
        for path, counters, trainings in self._checkpoints():
            if not fits(counters):
                continue
            found = next((each for each in self._places(path) if each.exists()), None)
            if found is None:
                continue  # pruned, or moved
            try:
                entry = Store(found.parent, found.stem).verify(found)
            except (OSError, ValueError) as error:
                skipped.append(str(error))
                continue
            if entry.weights_only:
                continue
            if [entry.progress.get(name) for name in ("epoch", "batch", "steps")] != [
                counters.epoch,
                counters.batch,
                counters.steps,
            ]:
                skipped.append(f"{found} is of another run: it has other counters than those that were recorded")
                continue
            if entry.training not in trainings:
                skipped.append(f"{found} is of another training, {entry.training}")
                continue
            return Origin(found, counters.steps, (counters.epoch, counters.batch), skipped)
        return Origin(skipped=skipped)

    def window_of(self, epoch: int, batch: int) -> int:
        """Return the first batch of those whose gradients a batch is added to, from 1; itself without accumulation."""
        batches = (each for each in self.whole.moments if each.what == "batch" and each.place[0] == epoch)
        is_open = {each.place[1] for each in batches if each.window}
        while batch - 1 in is_open:
            batch -= 1
        return batch

    def course_after(self, origin: Origin) -> Course:
        """Return what was recorded after an origin."""
        if origin.path is None:
            return self.whole
        return course_of(self.recording, str(self.recording.path), since=origin.begin)

    def _checkpoints(self) -> Iterator[tuple[Path, Counters, set[str]]]:
        """Yield the checkpoints that the run knew of, the newest first: the file, the counters, the ids it may have."""
        found: list[tuple[Path, Counters, set[str]]] = []
        saved = Counters()
        for _, entry, lost in walk(self.recording):
            if lost or not isinstance(entry, EventEntry):
                continue
            if entry.event == "save_point":
                saved = entry.counters
            if entry.event in NOTED and entry.data["path"] is not None:
                origin = entry.data.get("origin")
                counters = saved if origin is None else Counters(**origin)
                found.append((Path(entry.data["path"]), counters, _trainings_of(entry)))
        yield from reversed(found)

    def _places(self, path: Path) -> Iterator[Path]:
        """Yield where a checkpoint may lie: the run's folder may have been moved."""
        folders = [self._folder, *(each for each in self._folder.iterdir() if each.is_dir())]
        yield from (path, *(folder / path.name for folder in folders))


def _trainings_of(entry: EventEntry) -> set[str]:
    """Return the ids that the training of a checkpoint may have: a fork loads one of its parent, or its own."""
    parent = entry.data.get("forked_from") or {}
    return {str(each) for each in (entry.data["training"], parent.get("training")) if each}


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
