"""Say while a training runs where its time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from time import perf_counter, time
from typing import Any

from heliograph import (
    BatchEnd,
    BatchStart,
    CheckpointLoaded,
    EpochStart,
    ForwardEnd,
    Lane,
    Log,
    Plugin,
    Replay,
    Run,
    SavePoint,
    TrainEnd,
    TrainStart,
    ValidationCut,
    ValidationEnd,
    ValidationStart,
    on,
)
from heliograph.spi import Alarm, check_number

from ..explain.judge import MIN_SAMPLED, BottleneckJudge, Measured
from .memory import device_bytes, resident_bytes
from .step_clock import StepClock, Sums

SHARE = 0.01  # of the time since the training began: a stretch is at least so long, so that a long run has a thousand
FIRST_STEPS, MORE = 16, 4  # until the first look; and at most so many times as many until the next one
STEPS = attrgetter("steps")  # a plain attribute: a property would cost a call for every batch


class Verdicts(Plugin):
    """Measure where the time of a training goes, and emit a `Verdict` where something takes too much of it.

    - `input_bound`: a batch waits for its data for 30 % of its time;
    - `straggler`: one rank takes 1.3 times as long as the others, which wait for it;
    - `validation_bound`: validations take 30 % of the time;
    - `save_bound`: the training waits for saves for 10 % of the time;
    - `growing_memory`: the memory of a process grows, and is not freed.

    Each is emitted once when it begins to hold, with the evidence, and once when it does so no longer; on all ranks,
    with the same content. A log gets `train/goodput`, as `explain` has it, up to there: the part of the time since the
    training began in which it trained and what it did was kept, without the time before the first epoch of an attempt,
    validations, saves, and data that are waited for or read again. What a kill or a roll back has lost, and the time
    between attempts, count as time, not as training. A fork begins with itself.

    Some batches are timed, one in 20 ms at most, and the ranks exchange a few numbers for every stretch. A GPU works
    later than the process that asks it to: where that waits for the GPU in the forward pass, the wait is in it.

    Args:
        every: the seconds of a stretch; in a long training it is a hundredth of the time so far.

    Raises:
        ValueError: `every` is not positive.
    """

    policy = "observer"
    draws = False
    affects_training = False
    exclusive = ("verdicts",)

    def __init__(self, every: float = 10.0) -> None:
        self.every = check_number("Verdicts(every)", every, more_than=0)
        self.reset()

    def reset(self) -> None:
        """Forget the former run."""
        self._clock, self._judge = StepClock(), BottleneckJudge()
        self._useful = self._kept = 0.0  # at the end of the last stretch, and at the last save
        self._started = self._start = time()  # this attempt, and the training
        self._training, self._is_starting = "", True
        self._began, self._batches, self._steps = perf_counter(), 0, 0
        self._due = FIRST_STEPS
        self._goodput: float | None = None

    def describe(self, run: Run) -> str:
        """Say what is judged."""
        return "says where the time goes: data, ranks, validations, saves, memory"

    # The clock of this process.

    @on(BatchStart, lane=Lane.TRANSFORM, idle_until="next_sample")
    def end_load(self, run: Run, event: BatchStart) -> None:
        """The wait for the data of a batch has ended."""
        self._clock.end_load()

    @on(ForwardEnd, lane=Lane.TRANSFORM, idle_until="next_sample")
    def end_forward(self, run: Run, event: ForwardEnd) -> None:
        """The forward pass has ended."""
        self._clock.end_forward()

    @on(BatchEnd, lane=Lane.REPORT, idle_until="next_due")
    def end_batch(self, run: Run, event: BatchEnd) -> None:
        """Add a batch that is timed; at the end of a stretch, judge."""
        steps = run.progress.steps
        if steps >= self._clock.due:
            self._clock.end_batch(run.progress.batches, steps)
        if steps >= self._due:
            self._look(run)
            self._clock.restart_load()

    def next_sample(self, run: Run) -> Alarm:
        """Return the number of steps from which on a batch is timed."""
        return STEPS, self._clock.due

    def next_due(self, run: Run) -> Alarm:
        """Return the number of steps from which on a batch is timed, or the ranks exchange what they have measured."""
        return STEPS, min(self._clock.due, self._due)

    @on(EpochStart, lane=Lane.REPORT)
    def begin_epoch(self, run: Run, event: EpochStart) -> None:
        """The wait for data begins; what came before the first epoch of an attempt was no training."""
        if self._is_starting:
            self._begin(run)
            self._is_starting = False
        self._clock.restart_load()

    @on(Replay, optional=True)
    def pass_replay(self, run: Run, event: Replay) -> None:
        """Data were read again up to here, which is no training."""
        self._begin(run)

    @on(Log, lane=Lane.REPORT, optional=True)
    def restart_load(self, run: Run, event: Log) -> None:
        """The wait for data begins after a log."""
        self._clock.restart_load()

    @on(ValidationStart, lane=Lane.TRANSFORM, optional=True)
    def begin_validation(self, run: Run, event: ValidationStart) -> None:
        """A validation begins."""
        self._clock.begin_validation()

    @on(ValidationEnd, ValidationCut, lane=Lane.REPORT, optional=True)
    def end_validation(self, run: Run, event: ValidationEnd | ValidationCut) -> None:
        """It has ended."""
        self._clock.end_validation()

    @on(SavePoint, lane=Lane.TRANSFORM, optional=True)
    def begin_save(self, run: Run, event: SavePoint) -> None:
        """State is saved, and with it the time that was of use up to here."""
        self._kept = self._useful
        if (batches := run.progress.batches - self._batches) > 0:
            self._kept += _stretch(perf_counter() - self._began, batches, [(self._clock.sums, 0, 0)]).useful
        self._clock.begin_save()

    @on(SavePoint, lane=Lane.REPORT, optional=True)
    def end_save(self, run: Run, event: SavePoint) -> None:
        """It is saved, or copied to be."""
        self._clock.end_save()

    # The stretches, of which all ranks know the same.

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Begin the first stretch."""
        run.bus.signal(Measured)  # a recorder subscribes to the custom events that there are before the first batch
        self._training = run.checkpoints.training_id
        self._begin(run)

    @on(CheckpointLoaded)
    def begin_again(self, run: Run, event: CheckpointLoaded) -> None:
        """Begin a stretch where the run continues; what its parent has measured is not of a fork."""
        if self._training not in ("", run.checkpoints.training_id):
            self._training, self._start = run.checkpoints.training_id, self._started
            self._useful = self._kept = 0.0
        self._clock, self._is_starting = StepClock(), True
        self._begin(run)

    @on(TrainEnd, lane=Lane.TRANSFORM)
    def end(self, run: Run, event: TrainEnd) -> None:
        """End the last stretch."""
        self._look(run, is_end=True)

    @on(Log, lane=Lane.MEASURE, optional=True)
    def measure(self, run: Run, event: Log) -> None:
        """Add the goodput at the last look; in a replay, what the run measured is in the log already."""
        if self._goodput is not None and not run.report.is_replay:
            event.metrics["train/goodput"] = self._goodput

    def state_dict(self) -> dict[str, Any]:
        """Return the time that was of use up to the save, when the training began, and which one it is."""
        return {"useful": self._kept, "start": self._start, "training": self._training}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there: what was done after the save was of no use."""
        if state:
            self._useful = self._kept = state["useful"]
            self._start = state["start"]
            self._training = state["training"]

    def _begin(self, run: Run) -> None:
        self._clock.take()
        progress = run.progress
        self._began, self._batches, self._steps = perf_counter(), progress.batches, progress.steps
        self._due = self._steps + FIRST_STEPS

    def _look(self, run: Run, *, is_end: bool = False) -> None:
        """Exchange what was measured; end the stretch if it is long enough, by the clock of the main rank."""
        batches, steps = run.progress.batches - self._batches, max(1, run.progress.steps - self._steps)
        if run.report.is_replay or not batches:
            return
        engine, sums = run.engine, self._clock.sums
        own = (
            self._start, self._useful, time() - self._start, perf_counter() - self._began, sums,
            resident_bytes(), device_bytes(engine.device),
        )  # fmt: skip
        ranks = engine.gather_objects(own) if engine.world_size > 1 else [own]
        self._start, self._useful, elapsed, seconds, *_ = ranks[0]
        stretch = _stretch(seconds, batches, [each[4:] for each in ranks])
        useful = self._useful + stretch.useful
        self._goodput = min(1.0, useful / elapsed) if elapsed > 0 else None
        target = max(self.every, SHARE * elapsed)
        if (seconds >= target / 2 and stretch.sampled >= MIN_SAMPLED) or is_end:
            self._useful = self._kept = useful
            self._begin(run)
            run.emit(stretch)
            for verdict in self._judge.add(stretch):
                run.emit(verdict)
            seconds = 0.0
        wanted = max(MIN_SAMPLED, round((target - seconds) / max(stretch.seconds / steps, 1e-6)))
        self._due = run.progress.steps + min(wanted, MORE * steps)


def _stretch(seconds: float, batches: int, ranks: Sequence[tuple[Sums, int, int]]) -> Measured:
    """Return a stretch, from what each rank has measured."""
    sums, memory, device_memory = zip(*ranks, strict=True)
    main = sums[0]
    batch, load, forward = (
        tuple(getattr(each, name) / max(1, each.sampled) for each in sums) for name in ("batch", "load", "forward")
    )
    return Measured(
        seconds, batches, main.sampled, main.validation, main.validations, main.save, main.saves, batch, load, forward,
        memory, device_memory,
    )  # fmt: skip
