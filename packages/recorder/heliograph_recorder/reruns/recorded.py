"""A recorded run with its existing checkpoints, and its comparison with a rerun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from heliograph.spi import Store, check_whole_number, count, describe, membership

from ..divergence.compare import Divergence, compare
from ..divergence.course import Begin, Course, course_of
from ..explain.attempt_summary import ancestors
from ..format.reader import Follower, gc_paused, read
from ..format.records import AttemptRecord, Counters, EventEntry, Recording, walk
from ..plugin import Recorder
from .program import Change, NotExact

SILENT = (
    "the recording has neither digests nor losses, so only counters, requests and metrics of the rerun are compared: "
    "use Recorder(digests=True)"
)
NOTED = ("checkpoint_saved", "checkpoint_loaded")


@dataclass(frozen=True, slots=True)
class Origin:
    """The start of a rerun.

    Attributes:
        path: the checkpoint, None for the beginning of the run.
        step: its number of optimizer steps.
        place: its epoch, and the number of batches in it.
        skipped: newer checkpoints that cannot be used, with the reasons.
    """

    path: Path | None = None
    step: int = 0
    place: tuple[int, int] = 0, 0
    skipped: list[str] = field(default_factory=list)

    @property
    def begin(self) -> Begin | None:
        return None if self.path is None else (*self.place, self.step)


class RecordedRun:
    """A recorded training, given its recording or folder.

    Attributes:
        recording: the newest one in the folder.
        course: of the recording.
    """

    def __init__(self, path: str | Path) -> None:
        self._folder = Path(path) if Path(path).is_dir() else Path(path).parent
        self.recording: Recording = read(path)
        self.course = course_of(self.recording)

    @property
    def steps(self) -> int:
        return max((moment.step for moment in self.course.moments), default=0)

    @property
    def newest_step(self) -> int:
        """The optimizer step of the newest readable checkpoint."""
        origin = self.origin(self.steps)
        if origin.path is None:
            reasons = f": {'; '.join(reason.rstrip('.') for reason in origin.skipped)}" if origin.skipped else ""
            raise ValueError(
                f"{self.recording.path} has no checkpoint to continue{reasons}. Give at= (--at on the command line) to "
                f"repeat the steps from the beginning."
            )
        return origin.step

    @property
    def _first_attempt(self) -> AttemptRecord:
        return next(attempt for attempt in self.recording.attempts if attempt.phase == "train")

    def check_ranks(self) -> None:
        """Refuse a rerun with another world size than was recorded."""
        recorded = [attempt.world_size for attempt in self.recording.attempts if attempt.phase == "train"]
        if (present := membership().world_size) not in recorded:
            ranks = count(recorded[-1], "rank", "ranks")
            sizes = f"it was recorded with {ranks}, but the rerun has {count(present, 'rank', 'ranks')}"
            fix = f"start {ranks}, for example with torchrun --nproc-per-node={recorded[-1]}"
            raise NotExact((f"{sizes}: {fix}",))

    @property
    def change(self) -> str:
        """The name of the function that changed this fork; empty if it is not a changed fork."""
        parents = ancestors(self._first_attempt)
        return parents[0].change if parents else ""

    def change_between(self, origin: Origin, step: int) -> int | None:
        """Return the step of the change of this fork if it lies between a checkpoint and a step."""
        at = ancestors(self._first_attempt)[0].step if self.change else -1
        return at if origin.step <= at < step else None

    def check_change(self, origin: Origin, change: Change | None, *, exact: bool) -> int | None:
        """Return the step after which a rerun makes the change of this fork; None if it makes none."""
        if change is not None and not self.change:
            raise ValueError(f"{self.recording.path} is not a changed fork: leave change= out.")
        at = self.change_between(origin, self.steps)
        if at is None:
            return None
        name = "missing" if change is None else describe(change).rpartition("<locals>.")[2]
        if exact and name != self.change:
            raise NotExact(
                (
                    f"the fork was changed by {self.change} after step {at}, but change= is {name}: give the same "
                    f"function, change= (--change on the command line)",
                )
            )
        return None if change is None else at

    def silence(self, origin: Origin) -> list[str]:
        """Return a note if the recording has no digests and losses after the origin."""
        course = self.course_after(origin)
        return [] if course.digests or course.losses else [SILENT]

    def check_step(self, step: int, least: int) -> int:
        """Check that a step is recorded; `least` is 1 for a step to repeat, 0 to continue after it."""
        number = check_whole_number("step", step, at_least=least)
        begin = self.course.begin[2]
        if number - least < begin:
            parents = ancestors(self._first_attempt)
            hint = f"earlier steps are in {parents[0].recording}" if parents else "it has no earlier steps"
            raise ValueError(f"{self.recording.path} begins after step {begin}: {hint}.")
        if number > self.steps:
            raise ValueError(f"{self.recording.path} ends after step {self.steps}: there is no step {number}.")
        return number

    def origin(self, step: int) -> Origin:
        """Return the newest readable checkpoint after at most so many steps."""
        return self._newest(lambda counters: counters.steps <= step)

    def origin_before(self, epoch: int, batch: int) -> Origin:
        """Return the newest readable checkpoint before a batch of an epoch."""
        return self._newest(lambda counters: (counters.epoch, counters.batch) < (epoch, batch))

    def _newest(self, fits: Callable[[Counters], bool]) -> Origin:
        skipped: list[str] = []
        for path, counters in self._checkpoints():
            if not fits(counters):
                continue
            file = next((candidate for candidate in self._candidates(path) if candidate.exists()), None)
            if file is None:  # pruned or moved
                continue
            try:
                entry = Store(file.parent, file.stem).verify(file)
            except (OSError, ValueError) as error:
                skipped.append(str(error))
                continue
            if entry.weights_only:
                continue
            names = "epoch", "batch", "steps"
            if [entry.progress.get(name) for name in names] != [getattr(counters, name) for name in names]:
                skipped.append(f"{file} belongs to another run: its counters differ from the recording")
                continue
            return Origin(file, counters.steps, (counters.epoch, counters.batch), skipped)
        return Origin(skipped=skipped)

    def window_of(self, epoch: int, batch: int) -> int:
        """Return the first batch of the accumulation window of a batch, from 1."""
        moments = (moment for moment in self.course.moments if moment.kind == "batch" and moment.place[0] == epoch)
        without_step = {moment.place[1] for moment in moments if moment.facts[-1]}
        while batch - 1 in without_step:
            batch -= 1
        return batch

    def course_after(self, origin: Origin) -> Course:
        if origin.path is None:
            return self.course
        return course_of(self.recording, origin.begin)

    def _checkpoints(self) -> Iterator[tuple[Path, Counters]]:
        """Yield file and counters of the checkpoints in the recording, the newest first."""
        checkpoints: list[tuple[Path, Counters]] = []
        saved = Counters()
        for _, entry, lost in walk(self.recording):
            if lost or not isinstance(entry, EventEntry):
                continue
            if entry.event == "save_point":
                saved = entry.counters
            if entry.event in NOTED and entry.data["path"] is not None:
                origin = entry.data.get("origin")
                counters = saved if origin is None else Counters(**origin)
                checkpoints.append((Path(entry.data["path"]), counters))
        yield from reversed(checkpoints)

    def _candidates(self, path: Path) -> Iterator[Path]:
        """Yield the possible paths of a checkpoint: the folder of the run may have been moved."""
        folders = [self._folder, *(path for path in self._folder.iterdir() if path.is_dir())]
        yield from (path, *(folder / path.name for folder in folders))


class RerunComparison:
    """Compares a recorded run with the recording of its rerun, incrementally."""

    def __init__(self, recorded: RecordedRun, origin: Origin, recorder: Recorder) -> None:
        self._recorded, self._origin, self._recorder = recorded, origin, recorder

    @gc_paused()
    def compare(self) -> Divergence:
        self._recorder.flush()
        self._follower.update()
        rerun = course_of(self._follower.recording(), self._origin.begin, name="the rerun")
        return compare(self._course, rerun, is_complete=False)

    @cached_property
    def _course(self) -> Course:
        return self._recorded.course_after(self._origin)

    @cached_property
    def _follower(self) -> Follower:
        assert self._recorder.path is not None
        return Follower(self._recorder.path)
