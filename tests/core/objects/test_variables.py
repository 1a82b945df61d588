"""Variables of the user's modules, classes and functions: restored to what the training made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import heliograph as h
import pytest
import torch
from heliograph.tests.kit import sgd
from torch import Tensor, nn

SAVED, STEPS = 4, 8
NUMBER = 0


class Task(h.Supervised):
    """Multiplies its loss by what a function of a test counts."""

    def __init__(self, count: Callable[[], float]) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 2), nn.functional.cross_entropy)
        self.count = count

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        return super().training_step(run, batch) * (1 + self.count() / 10)


def in_global() -> float:
    global NUMBER  # what is tested
    NUMBER += 1
    return NUMBER


def in_attribute() -> float:
    in_attribute.calls += 1  # type: ignore[attr-defined]
    return float(in_attribute.calls)  # type: ignore[attr-defined]


def through_another() -> float:
    return in_global()


def in_default(seen: list[int] = []) -> float:  # noqa: B006  # what is tested
    seen.append(1)
    return float(len(seen))


class Counter:
    """Counts on the class."""

    calls: ClassVar[int] = 0

    @classmethod
    def count(cls) -> float:
        cls.calls += 1
        return cls.calls


def forget() -> None:
    """Be as a new process is."""
    global NUMBER
    NUMBER = Counter.calls = in_attribute.calls = 0  # type: ignore[attr-defined]


def fit(folder: Path, count: Callable[[], float], steps: int, *plugins: Any, **checkpoint: Any) -> h.RunResult:
    forget()
    batches = [(torch.full((3, 4), number / 10), torch.tensor([0, 1, 0])) for number in range(4)]
    saving = [h.SaveSchedule(h.At(steps=SAVED)), h.Checkpoint(folder, **checkpoint)]
    trainer = h.Trainer([h.RNGCapture(), *plugins, *saving], device="cpu")
    return trainer.fit(Task(count), batches, optimizer=sgd(), steps=steps)


def two_attempts(folder: Path, count: Callable[[], float], *plugins: Any) -> h.ResumeReport:
    first = fit(folder / "first", count, SAVED, *plugins)
    result = fit(folder / "second", count, STEPS, *plugins, resume=first.last_checkpoint)
    assert result.resume is not None
    return result.resume


@pytest.mark.parametrize(
    ("count", "path"),
    [
        (in_global, ".NUMBER"),
        (through_another, ".NUMBER"),
        (Counter.count, ".calls"),
        (in_attribute, ".__dict__['calls']"),
    ],
    ids=["global", "through another function", "class", "function"],
)
def test_what_the_training_counted_in_is_restored(tmp_path: Path, count: Callable[[], float], path: str) -> None:
    report = two_attempts(tmp_path, count)
    assert any(name.endswith(path) for name in report.restored), report
    assert report.reasons == ()
    assert count() == STEPS + 1


def test_a_list_that_is_a_default_argument_is_restored(tmp_path: Path) -> None:
    defaults = in_default.__defaults__
    assert defaults is not None
    defaults[0].clear()
    first = fit(tmp_path / "first", in_default, SAVED)
    defaults[0].clear()
    fit(tmp_path / "second", in_default, STEPS, resume=first.last_checkpoint)
    assert len(defaults[0]) == STEPS


class Connects(h.Plugin):
    """Connects a handler that counts in a closure."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    @h.on(h.TrainStart)
    def connect(self, run: h.Run, event: h.TrainStart) -> None:
        self.count = count = [0]

        def scale(run: h.Run, event: h.BatchStart) -> None:
            count[0] += 1
            run.control.scale_loss(1 + count[0] / 10, "it counts")

        run.bus.on(h.BatchStart, scale)


@pytest.mark.parametrize(("policy", "expected"), [("critical", STEPS), ("observer", STEPS - SAVED)])
def test_a_connected_function_that_counts_is_restored_but_not_that_of_an_observer(
    tmp_path: Path, policy: str, expected: int
) -> None:
    first = fit(tmp_path / "first", lambda: 1.0, SAVED, Connects(policy))
    plugin = Connects(policy)
    fit(tmp_path / "second", lambda: 1.0, STEPS, plugin, resume=first.last_checkpoint)
    assert plugin.count == [expected]


def test_a_connected_function_is_restored_but_not_its_logs(tmp_path: Path) -> None:
    def run_with(steps: int, **checkpoint: Any) -> tuple[list[int], list[int]]:
        count, seen = [0], list[int]()

        def look(run: h.Run, event: h.StepEnd) -> None:
            count[0] += 1
            seen.append(run.progress.steps)

        saving = [h.SaveSchedule(h.At(steps=SAVED)), h.Checkpoint(tmp_path, **checkpoint)]
        trainer = h.Trainer([h.RNGCapture(), *saving], device="cpu")
        trainer.bus.on(h.StepEnd, look)
        batches = [(torch.full((3, 4), number / 10), torch.tensor([0, 1, 0])) for number in range(4)]
        result = trainer.fit(Task(lambda: 1.0), batches, optimizer=sgd(), steps=steps)
        assert result.resume is not None
        assert result.resume.reasons == ()
        return count, seen

    assert run_with(SAVED) == ([SAVED], list(range(1, SAVED + 1)))
    assert run_with(STEPS, resume="auto") == ([STEPS], list(range(SAVED + 1, STEPS + 1)))


def test_the_closures_of_a_class_count(tmp_path: Path) -> None:
    def make(losses: list[float]) -> h.Plugin:
        class Logs(h.Plugin):
            @h.on(h.BatchEnd)
            def log(self, run: h.Run, event: h.BatchEnd) -> None:
                losses.append(1.0)

        return Logs()

    first = fit(tmp_path, lambda: 1.0, SAVED, make([]))
    losses: list[float] = []
    fit(tmp_path / "second", lambda: 1.0, STEPS, make(losses), resume=first.last_checkpoint)
    assert len(losses) == STEPS


class Named(type):
    """Knows attributes that nobody gave it, and no others."""

    def __getattr__(cls, name: str) -> Any:
        raise KeyError(name)


class Odd(metaclass=Named):
    """Whose attributes cannot all be read."""

    __slots__ = ("held",)
    number = 3
    held: Any

    def __len__(self) -> int:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    @property
    def broken(self) -> int:
        raise ValueError


ODD = [Odd(), Odd]


def test_objects_that_cannot_be_read_do_not_fail_a_save(tmp_path: Path) -> None:
    report = two_attempts(tmp_path, lambda: 1.0)
    assert all("ODD" in path or "Odd" in path for path in report.untracked)
    assert report.differences == ()


def test_a_roll_back_leaves_plugins_and_modules_alone(tmp_path: Path) -> None:
    class Returns(h.Plugin):
        def __init__(self) -> None:
            self.returns = 0

        @h.on(h.StepEnd)
        def go_back(self, run: h.Run, event: h.StepEnd) -> None:
            global NUMBER  # what is tested
            if run.progress.steps == SAVED + 1 and self.returns < 2:
                self.returns += 1
                NUMBER += 1
                assert run.checkpoints.last is not None
                run.roll_back(torch.load(run.checkpoints.last, weights_only=True), run.checkpoints.last)

    plugin = Returns()
    result = fit(tmp_path, lambda: 1.0, STEPS, plugin)
    assert (result.progress.steps, plugin.returns, NUMBER) == (STEPS, 2, 2)


def halve(run: h.Run, event: h.BatchStart) -> None:
    run.control.scale_loss(0.5, "it listens")


class ConnectsLater(h.Plugin):
    """Connects a function at a step that a resumed run does not repeat."""

    @h.on(h.StepEnd)
    def connect(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == SAVED - 1:
            run.bus.on(h.BatchStart, halve)


def test_a_function_that_a_plugin_connected_in_the_run_is_reported_by_all_later_resumes(tmp_path: Path) -> None:
    checkpoint = fit(tmp_path / "first", lambda: 1.0, SAVED, ConnectsLater()).last_checkpoint
    for steps in (STEPS, STEPS + SAVED):
        result = fit(tmp_path / str(steps), lambda: 1.0, steps, ConnectsLater(), resume=checkpoint)
        assert result.resume is not None
        assert any("halve" in reason for reason in result.resume.reasons)
        checkpoint = result.last_checkpoint
