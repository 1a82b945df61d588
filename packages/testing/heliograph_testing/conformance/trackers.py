"""`check_tracker`: a tracker against what every tracker promises, by what is read back from its page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from heliograph import (
    At,
    BatchStart,
    Every,
    Lane,
    Log,
    LogSchedule,
    Run,
    RunResult,
    SavePoint,
    SaveSchedule,
    StepEnd,
    Trainer,
    TrainStart,
    ValidationEnd,
    ValidationSchedule,
)
from heliograph.spi import Tracker

from .subject import Batches, small_task

Points = Mapping[str, Sequence[tuple[int, float]]]
MakeTracker = Callable[[Path], Tracker]
STEPS = 6  # two epochs of three batches
HYPER_PARAMETERS = {"rate": 0.01, "layers": [4, 2], "deep": False, "kind": "linear"}


class CrashError(Exception):
    """Raised on purpose."""


def check_tracker(
    make_tracker: MakeTracker,
    read: Callable[[Path], Points],
    *,
    read_status: Callable[[Path], str] | None = None,
    statuses: Mapping[str, str] | None = None,
) -> None:
    """Check a tracker by what it shows of short trainings: every point once, also after a resume.

    Args:
        make_tracker: returns a new tracker whose page is in, or belongs to, a folder; called several times with one.
        read: returns what the page of a folder shows: by the name of each metric, its steps and values in their order.
        read_status: returns how the page says that the run ended; None where it cannot say that.
        statuses: the page's words for `completed`, `stopped`, `preempted` and `failed`; by default these.

    Raises:
        AssertionError: the tracker breaks a promise; says which.
    """
    for promise in (
        shows_every_point_once,
        continues_its_page,
        shows_what_came_after_a_roll_back,
        leaves_the_loop_alone,
    ):
        with TemporaryDirectory() as folder:
            promise(make_tracker, read, Path(folder))
    if read_status is not None:
        words = statuses or {}
        for status in ("completed", "stopped", "preempted", "failed"):
            with TemporaryDirectory() as folder:
                _end(make_tracker(Path(folder)), status)
                found, expected = read_status(Path(folder)), words.get(status, status)
                assert found == expected, f"A run that ended {status} is shown as {found!r}, not as {expected!r}."


def shows_every_point_once(make_tracker: MakeTracker, read: Callable[[Path], Points], folder: Path) -> None:
    """A training, its validations and all that it logs are shown, each point once, and no warning is given."""
    tracker, logged = make_tracker(folder), _Logged()
    result = _fit(tracker, logged.listen, _log_everything)
    assert result.warnings == (), f"The result has warnings: {result.warnings}"
    _compare(read(folder), logged.points)


def continues_its_page(make_tracker: MakeTracker, read: Callable[[Path], Points], folder: Path) -> None:
    """A run that fails after its checkpoint, and another that resumes from there, show every step once, on one page."""
    saved: list[dict[str, Any]] = []
    logged = _Logged()

    def fail(run: Run, event: BatchStart) -> None:
        if run.progress.steps == STEPS - 1:
            raise CrashError("on purpose")

    with suppress(CrashError):
        _fit(make_tracker(folder), logged.listen, _keep(saved), lambda trainer: trainer.bus.on(BatchStart, fail))
    _fit(make_tracker(folder), logged.listen, lambda trainer: trainer.bus.on(TrainStart, _resume(saved[0])))
    _compare(read(folder), logged.points)


def shows_what_came_after_a_roll_back(make_tracker: MakeTracker, read: Callable[[Path], Points], folder: Path) -> None:
    """Where a training goes back and continues differently, the last point of each step is that of the second time."""
    saved: list[dict[str, Any]] = []
    logged = _Logged()

    def go_back(run: Run, event: StepEnd) -> None:
        if run.progress.steps == STEPS - 1 and len(saved) == 1:
            run.roll_back(saved[0])
            saved.append({})
        elif len(saved) == 2:
            for group in run.optimizer.param_groups:
                group["lr"] = 0.5

    _fit(make_tracker(folder), logged.listen, _keep(saved), lambda trainer: trainer.bus.on(StepEnd, go_back))
    shown = {name: sorted(dict(points).items()) for name, points in read(folder).items()}
    _compare(shown, logged.points)


def leaves_the_loop_alone(make_tracker: MakeTracker, read: Callable[[Path], Points], folder: Path) -> None:
    """Nothing is written in the thread of the training, and an error while writing is a warning of the result."""
    tracker: Any = make_tracker(folder)
    threads: set[int] = set()
    write = tracker.write_scalars

    def watch(place: Any, values: Any) -> None:
        threads.add(threading.get_ident())
        if place.step == 2:
            raise CrashError("on purpose")
        write(place, values)

    tracker.write_scalars = watch
    result = _fit(tracker)
    assert threading.get_ident() not in threads, "write_scalars was called in the thread of the training."
    assert result.status == "completed", f"An error while writing ended the run as {result.status}."
    assert any(tracker.name in each for each in result.warnings), "A record was lost, and the result does not say so."


class _Logged:
    """What a training logs: the last value of each name at each step."""

    def __init__(self) -> None:
        self.points: dict[str, dict[int, float]] = {}

    def listen(self, trainer: Trainer) -> None:
        for kind in (Log, ValidationEnd):
            trainer.bus.on(kind, self.add, lane=Lane.REPORT)

    def add(self, run: Run, event: Log | ValidationEnd) -> None:
        for name, value in event.metrics.items():
            self.points.setdefault(name, {})[run.progress.steps] = float(value)


def _fit(tracker: Tracker, *listen: Callable[[Trainer], object]) -> RunResult:
    trainer = Trainer([LogSchedule(Every(steps=1)), ValidationSchedule(Every(epochs=1)), tracker], device="cpu")
    for each in listen:
        each(trainer)
    task = small_task()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01)
    return trainer.fit(
        task, Batches(), validation=Batches(), optimizer=optimizer, epochs=2, hyper_parameters=HYPER_PARAMETERS
    )


def _keep(saved: list[dict[str, Any]]) -> Callable[[Trainer], None]:
    """Keep the state after the second step, once."""

    def keep(run: Run, event: SavePoint) -> None:
        if not saved:
            saved.append(deepcopy(run.state_dict()))

    def listen(trainer: Trainer) -> None:
        trainer.plugins.register(SaveSchedule(At(steps=2), at_end=False))
        trainer.bus.on(SavePoint, keep, lane=Lane.PERSIST)

    return listen


def _resume(saved: Mapping[str, Any]) -> Callable[[Run, TrainStart], None]:
    def resume(run: Run, event: TrainStart) -> None:
        run.resume(saved)

    return resume


def _log_everything(trainer: Trainer) -> None:
    def log(run: Run, event: StepEnd) -> None:
        run.log_image("image", torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0)))
        run.log_text("text", "*words*")
        run.log_histogram("histogram", torch.arange(10.0))
        run.log_curve("curve", [0, 1, 1, 0], [0.1, 0.9, 0.4, 0.6])
        run.log_file("file", Path(__file__))

    trainer.bus.on(StepEnd, log)


def _end(tracker: Tracker, status: str) -> None:
    def end(run: Run, event: StepEnd) -> None:
        if status == "failed":
            raise CrashError("on purpose")
        if status != "completed":
            run.control.stop("enough", required=status == "preempted")

    with suppress(CrashError):
        _fit(tracker, lambda trainer: trainer.bus.on(StepEnd, end))


def _compare(shown: Points, logged: Mapping[str, Mapping[int, float]]) -> None:
    for name, points in logged.items():
        if name.endswith("_per_second"):  # measured anew by each run, and not in its first log
            continue
        assert name in shown, f"{name} is not shown; there is {sorted(shown)}."
        steps = [step for step, _ in shown[name]]
        assert steps == sorted(points), f"{name} is shown at the steps {steps}, and was logged at {sorted(points)}."
        for step, value in shown[name]:
            expected = points[step]
            close = abs(value - expected) <= 1e-5 * max(1.0, abs(expected))
            assert close, f"{name} is shown as {value} at step {step}, and was {expected}."
