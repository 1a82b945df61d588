"""`check_tracker` checks a tracker by the content of its page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from heliograph import At, Every, Lane, LogSchedule, Run, RunResult, SaveSchedule, Trainer, ValidationSchedule
from heliograph import events as ev
from heliograph.spi import Tracker

from .subject import CrashError, RuleBatches, resume_from, small_task

Points = Mapping[str, Sequence[tuple[int, float]]]
MakeTracker = Callable[[Path], Tracker]
STEPS = 6  # two epochs of three batches
HYPER_PARAMETERS = {"rate": 0.01, "layers": [4, 2], "deep": False, "kind": "linear"}


def check_tracker(
    make_tracker: MakeTracker,
    read: Callable[[Path], Points],
    *,
    read_status: Callable[[Path], str] | None = None,
    statuses: Mapping[str, str] | None = None,
) -> None:
    """Check that a tracker shows every point of short trainings once, also after a resume.

    Args:
        make_tracker: returns a new tracker whose page belongs to a folder; called several times per folder.
        read: returns the content of the page of a folder: for each metric its (step, value) points in order.
        read_status: returns how the page shows the end of the run; None if it does not show it.
        statuses: the page's words for `completed`, `stopped`, `preempted` and `failed`; by default the same words.

    Raises:
        AssertionError: the tracker breaks a promise; the message names the metric and step.
    """
    for promise in (
        shows_every_point_once,
        continues_its_page,
        shows_steps_after_a_roll_back,
        writes_in_the_background,
    ):
        with TemporaryDirectory() as folder:
            promise(make_tracker, read, Path(folder))
    if read_status is not None:
        words = statuses or {}
        for status in ("completed", "stopped", "preempted", "failed"):
            with TemporaryDirectory() as folder:
                _end(make_tracker(Path(folder)), status)
                shown, expected = read_status(Path(folder)), words.get(status, status)
                assert shown == expected, f"A run that ended {status} is shown as {shown!r} instead of {expected!r}."


def shows_every_point_once(make_tracker: MakeTracker, read: Callable[[Path], Points], folder: Path) -> None:
    tracker, logged = make_tracker(folder), _Logged()
    result = _fit(tracker, logged.listen, _on(ev.StepEnd, _log_everything))
    assert result.warnings == (), f"The result has warnings: {result.warnings}"
    _compare(read(folder), logged.points)


def continues_its_page(make_tracker: MakeTracker, read: Callable[[Path], Points], folder: Path) -> None:
    saved: list[dict[str, Any]] = []
    logged = _Logged()

    def fail(run: Run, event: ev.BatchStart) -> None:
        if run.progress.steps == STEPS - 1:
            raise CrashError("on purpose")

    with suppress(CrashError):
        _fit(make_tracker(folder), logged.listen, _save_second_step(saved), _on(ev.BatchStart, fail))
    _fit(make_tracker(folder), logged.listen, lambda trainer: resume_from(trainer, saved[0]))
    _compare(read(folder), logged.points)


def shows_steps_after_a_roll_back(make_tracker: MakeTracker, read: Callable[[Path], Points], folder: Path) -> None:
    saved: list[dict[str, Any]] = []
    logged = _Logged()

    def go_back(run: Run, event: ev.StepEnd) -> None:
        if run.progress.steps == STEPS - 1 and len(saved) == 1:
            run.roll_back(saved[0])
            saved.append({})
        elif len(saved) == 2:
            for group in run.optimizer.param_groups:
                group["lr"] = 0.5

    _fit(make_tracker(folder), logged.listen, _save_second_step(saved), _on(ev.StepEnd, go_back))
    shown = {name: sorted(dict(points).items()) for name, points in read(folder).items()}
    _compare(shown, logged.points)


def writes_in_the_background(make_tracker: MakeTracker, read: Callable[[Path], Points], folder: Path) -> None:
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
    assert threading.get_ident() not in threads, "write_scalars was called in the training thread."
    assert result.status == "completed", f"A write error ended the run as {result.status}."
    assert any(tracker.name in warning for warning in result.warnings), "A lost record is missing in result.warnings."


class _Logged:
    """The last logged value of each metric at each step."""

    def __init__(self) -> None:
        self.points: dict[str, dict[int, float]] = {}

    def listen(self, trainer: Trainer) -> None:
        for kind in (ev.Log, ev.ValidationEnd):
            trainer.bus.on(kind, self.add, lane=Lane.REPORT)

    def add(self, run: Run, event: ev.Log | ev.ValidationEnd) -> None:
        for name, value in event.metrics.items():
            self.points.setdefault(name, {})[run.progress.steps] = float(value)


def _fit(tracker: Tracker, *listen: Callable[[Trainer], object]) -> RunResult:
    trainer = Trainer([LogSchedule(Every(steps=1)), ValidationSchedule(Every(epochs=1)), tracker], device="cpu")
    for subscribe in listen:
        subscribe(trainer)
    task = small_task()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01)
    return trainer.fit(
        task, RuleBatches(), validation=RuleBatches(), optimizer=optimizer, epochs=2, hyper_parameters=HYPER_PARAMETERS
    )


def _save_second_step(saved: list[dict[str, Any]]) -> Callable[[Trainer], None]:
    def keep(run: Run, event: ev.SavePoint) -> None:
        if not saved:
            saved.append(deepcopy(run.state_dict()))

    def listen(trainer: Trainer) -> None:
        trainer.plugins.register(SaveSchedule(At(steps=2), at_end=False))
        trainer.bus.on(ev.SavePoint, keep, lane=Lane.PERSIST)

    return listen


def _on(event: type[ev.Event], receiver: ev.Receiver) -> Callable[[Trainer], object]:
    return lambda trainer: trainer.bus.on(event, receiver)


def _log_everything(run: Run, event: ev.StepEnd) -> None:
    run.log_image("image", torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0)))
    run.log_text("text", "*words*")
    run.log_histogram("histogram", torch.arange(10.0))
    run.log_curve("curve", [0, 1, 1, 0], [0.1, 0.9, 0.4, 0.6])
    run.log_file("file", Path(__file__))


def _end(tracker: Tracker, status: str) -> None:
    def end(run: Run, event: ev.StepEnd) -> None:
        if status == "failed":
            raise CrashError("on purpose")
        if status != "completed":
            run.control.stop("enough", required=status == "preempted")

    with suppress(CrashError):
        _fit(tracker, _on(ev.StepEnd, end))


def _compare(shown: Points, logged: Mapping[str, Mapping[int, float]]) -> None:
    for name, points in logged.items():
        if name.endswith("_per_second"):  # differs between runs
            continue
        assert name in shown, f"{name} is not shown, only {sorted(shown)}."
        steps = [step for step, _ in shown[name]]
        assert steps == sorted(points), f"{name} is shown at steps {steps}, but was logged at {sorted(points)}."
        for step, value in shown[name]:
            expected = points[step]
            close = abs(value - expected) <= 1e-5 * max(1.0, abs(expected))
            assert close, f"{name} is shown as {value} at step {step}, but was {expected}."
