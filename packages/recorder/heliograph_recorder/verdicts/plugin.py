"""`Verdicts`: goodput and bottlenecks of a training."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from time import perf_counter, time
from typing import Any, Literal

import heliograph as h
from heliograph.events import Alarm
from heliograph.spi import check_number

from ..explain.judge import MIN_SAMPLED, BottleneckJudge, Measured

SHARE = 0.01  # of the time so far: the shortest stretch of a long run, so that it has at most a thousand
FIRST_STEPS, GROWTH = 16, 4  # steps until the first exchange, and the largest ratio between two intervals
STEPS = attrgetter("steps")  # a plain attribute: a property would cost a call for every batch
SPACING = 0.02  # seconds between two timed batches, at least; timing one takes about 10 µs
STRIDE = 7919  # a prime, so that the timed batches do not coincide with a period of the training
STATM = Path("/proc/self/statm")


Pause = Literal["validation", "save"]


@dataclass(slots=True)
class Sums:
    """Times since the last stretch.

    Attributes:
        sampled: the number of timed batches.
        batch, load, forward: their seconds; see `Measured`.
        seconds, times: the length and the number of validations and saves.
    """

    sampled: int = 0
    batch: float = 0.0
    load: float = 0.0
    forward: float = 0.0
    seconds: dict[Pause, float] = field(default_factory=lambda: {"validation": 0.0, "save": 0.0})
    times: Counter[Pause] = field(default_factory=Counter)


class StepClock:
    """Measures the parts of some batches, in at most a thousandth of the time.

    Attributes:
        sums: since the last `take`.
        due: the step from which on batches are timed: first the end of a batch, then the next batch.
    """

    def __init__(self) -> None:
        self.sums, self.due = Sums(), 0
        self._ended: float | None = None  # when the wait for the data of the timed batch began
        self._previous = 0  # the number of the batch before it
        self._began: float | None = None  # when its data had arrived
        self._load = self._forward = 0.0
        self._pauses: dict[Pause, float] = {}  # when a validation or a save began

    def take(self) -> Sums:
        """Return the sums, and reset them."""
        sums, self.sums = self.sums, Sums()
        return sums

    def end_load(self) -> None:
        now = perf_counter()
        self._began, self._load = now, 0.0 if self._ended is None else now - self._ended

    def end_forward(self) -> None:
        if self._began is not None:
            self._forward = perf_counter() - self._began

    def end_batch(self, batches: int, steps: int) -> None:
        """Add a batch if it was timed, and choose the next one to time, given the numbers of batches and steps."""
        now, sums, gap = perf_counter(), self.sums, 0
        if self._ended is not None and self._began is not None and batches == self._previous + 1:
            period = self._load + now - self._began
            sums.sampled += 1
            sums.batch += period
            sums.load += self._load
            sums.forward += self._forward
            gap = int(SPACING / max(period, 1e-6))
            gap += sums.sampled * STRIDE % (gap // 2 + 1)
        self._began, self._ended, self._previous = None, None if gap else now, batches
        self.due = steps + gap

    def restart_load(self) -> None:
        """Exclude the time since the last batch from the wait for data."""
        if self._ended is not None:
            self._ended = perf_counter()

    def begin(self, pause: Pause) -> None:
        self._pauses[pause] = perf_counter()

    def end(self, pause: Pause) -> None:
        if (began := self._pauses.pop(pause, None)) is not None:
            self.sums.seconds[pause] += perf_counter() - began
            self.sums.times[pause] += 1
        self.restart_load()


class Verdicts(h.Plugin):
    """Measure the goodput of a training, and emit a `Verdict` for each bottleneck.

    - `input_bound`: a batch waits for its data for 30 % of its time;
    - `straggler`: one rank takes 1.3 times as long as the others, and they wait for it;
    - `validation_bound`: validations take 30 % of the time;
    - `save_bound`: the training waits for saves for 10 % of the time;
    - `growing_memory`: the memory of a process grows, and is not freed.

    A verdict is emitted when its condition begins, with the evidence, and when it ends. All ranks emit the same ones.

    A log gets `train/goodput`: the share of useful training in the time since the training began, as in `explain`. Not
    useful are the time before the first epoch of an attempt, validations, saves, waiting for data, reading data again,
    work that a kill or a roll-back discards, and the time between attempts. A fork starts from zero.

    At most one batch in 20 ms is timed, and the ranks exchange a few numbers for every stretch. A GPU runs behind its
    process. If the process waits for it in the forward pass, the wait is part of the forward pass.

    Args:
        every: the seconds of a stretch; in a long training, a hundredth of the time so far.

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
        self._clock, self._judge = StepClock(), BottleneckJudge()
        self._useful = self._saved = 0.0  # useful seconds at the end of the last stretch, and at the last save
        self._started = self._start = time()  # this attempt, and the training
        self._training, self._is_starting = "", True
        self._began, self._batches, self._steps = perf_counter(), 0, 0
        self._due = FIRST_STEPS
        self._goodput: float | None = None

    def describe(self, run: h.Run) -> str:
        return "measures the time of data, ranks, validations and saves, and memory"

    # The clock of this process.

    @h.on(h.BatchStart, lane=h.Lane.TRANSFORM, idle_until="next_sample")
    def end_load(self, run: h.Run, event: h.BatchStart) -> None:
        self._clock.end_load()

    @h.on(h.ForwardEnd, lane=h.Lane.TRANSFORM, idle_until="next_sample")
    def end_forward(self, run: h.Run, event: h.ForwardEnd) -> None:
        """The forward pass has ended."""
        self._clock.end_forward()

    @h.on(h.BatchEnd, lane=h.Lane.REPORT, idle_until="next_due")
    def end_batch(self, run: h.Run, event: h.BatchEnd) -> None:
        steps = run.progress.steps
        if steps >= self._clock.due:
            self._clock.end_batch(run.progress.batches, steps)
        if steps >= self._due:
            self._exchange(run)
            self._clock.restart_load()

    def next_sample(self, run: h.Run) -> Alarm:
        return STEPS, self._clock.due

    def next_due(self, run: h.Run) -> Alarm:
        return STEPS, min(self._clock.due, self._due)

    @h.on(h.EpochStart, lane=h.Lane.REPORT)
    def begin_epoch(self, run: h.Run, event: h.EpochStart) -> None:
        if self._is_starting:  # the setup is not useful
            self._begin(run)
            self._is_starting = False
        self._clock.restart_load()

    @h.on(h.Replay, optional=True)
    def pass_replay(self, run: h.Run, event: h.Replay) -> None:
        self._begin(run)  # reading data again is not useful

    @h.on(h.Log, lane=h.Lane.REPORT, optional=True)
    def restart_load(self, run: h.Run, event: h.Log) -> None:
        self._clock.restart_load()

    @h.on(h.ValidationStart, lane=h.Lane.TRANSFORM, optional=True)
    def begin_validation(self, run: h.Run, event: h.ValidationStart) -> None:
        self._clock.begin("validation")

    @h.on(h.ValidationEnd, h.ValidationCut, lane=h.Lane.REPORT, optional=True)
    def end_validation(self, run: h.Run, event: h.ValidationEnd | h.ValidationCut) -> None:
        self._clock.end("validation")

    @h.on(h.SavePoint, lane=h.Lane.TRANSFORM, optional=True)
    def begin_save(self, run: h.Run, event: h.SavePoint) -> None:
        self._saved = self._useful
        if (batches := run.progress.batches - self._batches) > 0:
            self._saved += _stretch(perf_counter() - self._began, batches, [(self._clock.sums, 0, 0)]).useful
        self._clock.begin("save")

    @h.on(h.SavePoint, lane=h.Lane.REPORT, optional=True)
    def end_save(self, run: h.Run, event: h.SavePoint) -> None:
        self._clock.end("save")

    # The stretches, which are the same on all ranks.

    @h.on(h.TrainStart)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        run.bus.signal(Measured)  # a recorder subscribes to custom events before the first batch
        self._training = run.checkpoints.training_id
        self._begin(run)

    @h.on(h.CheckpointLoaded)
    def begin_again(self, run: h.Run, event: h.CheckpointLoaded) -> None:
        # A fork does not continue the measurements of its parent.
        if self._training not in ("", run.checkpoints.training_id):
            self._training, self._start = run.checkpoints.training_id, self._started
            self._useful = self._saved = 0.0
        self._clock, self._is_starting = StepClock(), True
        self._begin(run)

    @h.on(h.TrainEnd, lane=h.Lane.TRANSFORM)
    def end(self, run: h.Run, event: h.TrainEnd) -> None:
        self._exchange(run, is_end=True)

    @h.on(h.Log, lane=h.Lane.MEASURE, optional=True)
    def measure(self, run: h.Run, event: h.Log) -> None:
        # In a replay, the log already has the value of the run.
        if self._goodput is not None and not run.report.is_replay:
            event.metrics["train/goodput"] = self._goodput

    def state_dict(self) -> dict[str, Any]:
        return {"useful": self._saved, "start": self._start, "training": self._training}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._useful = self._saved = state["useful"]
            self._start = state["start"]
            self._training = state["training"]

    def _begin(self, run: h.Run) -> None:
        self._clock.take()
        progress = run.progress
        self._began, self._batches, self._steps = perf_counter(), progress.batches, progress.steps
        self._due = self._steps + FIRST_STEPS

    def _exchange(self, run: h.Run, *, is_end: bool = False) -> None:
        """Exchange the measurements; end the stretch if it is long enough by the clock of the main rank."""
        batches, steps = run.progress.batches - self._batches, max(1, run.progress.steps - self._steps)
        if run.report.is_replay or not batches:
            return
        engine, sums = run.engine, self._clock.sums
        measured = (
            self._start, self._useful, time() - self._start, perf_counter() - self._began, sums,
            resident_bytes(), device_bytes(engine.device),
        )  # fmt: skip
        ranks = engine.gather_objects(measured) if engine.world_size > 1 else [measured]
        self._start, self._useful, elapsed, seconds, *_ = ranks[0]
        stretch = _stretch(seconds, batches, [rank[4:] for rank in ranks])
        useful = self._useful + stretch.useful
        self._goodput = min(1.0, useful / elapsed) if elapsed > 0 else None
        target = max(self.every, SHARE * elapsed)
        if (seconds >= target / 2 and stretch.sampled >= MIN_SAMPLED) or is_end:
            self._useful = self._saved = useful
            self._begin(run)
            run.emit(stretch)
            for verdict in self._judge.add(stretch):
                run.emit(verdict)
            seconds = 0.0
        wanted = max(MIN_SAMPLED, round((target - seconds) / max(stretch.seconds / steps, 1e-6)))
        self._due = run.progress.steps + min(wanted, GROWTH * steps)


def _stretch(seconds: float, batches: int, ranks: Sequence[tuple[Sums, int, int]]) -> Measured:
    sums, memory, device_memory = zip(*ranks, strict=True)
    main = sums[0]
    batch, load, forward = (
        tuple(getattr(rank_sums, name) / max(1, rank_sums.sampled) for rank_sums in sums)
        for name in ("batch", "load", "forward")
    )
    return Measured(
        seconds, batches, main.sampled, main.seconds["validation"], main.times["validation"], main.seconds["save"],
        main.times["save"], batch, load, forward, memory, device_memory,
    )  # fmt: skip


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 except on Linux."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def device_bytes(device: Any) -> int:
    """Return the memory of tensors on a CUDA device, without waiting for it; 0 on other devices."""
    if getattr(device, "type", "") != "cuda":
        return 0
    import torch

    return int(torch.cuda.memory_allocated(device))
