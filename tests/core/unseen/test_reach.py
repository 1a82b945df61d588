"""Variables that the user's code reads: restored where they are plain and the training changed them, else named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.core import storage
from heliograph.core.unseen import reach
from torch import Tensor, nn

SAVED, STEPS = 4, 8
GLOBAL = [0]
NUMBER = 0
STATE = np.zeros(2)


class Task(h.Supervised):
    """Multiplies its loss by what a function of a test counts."""

    def __init__(self, count: Callable[[], float]) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 2), nn.functional.cross_entropy)
        self.count = count

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        return super().training_step(run, batch) * (1 + self.count() / 10)


def in_list() -> float:
    GLOBAL[0] += 1
    return GLOBAL[0]


def in_number() -> float:
    global NUMBER  # what is tested
    NUMBER += 1
    return NUMBER


def in_array() -> float:
    STATE[0] += 1
    return float(STATE[0])


def in_closure() -> Callable[[], float]:
    calls = 0

    def count() -> float:
        nonlocal calls
        calls += 1
        return calls

    return count


def in_default(calls: list[int] = [0]) -> float:  # noqa: B006  # what is tested
    calls[0] += 1
    return calls[0]


def in_attribute() -> float:
    in_attribute.calls = getattr(in_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return float(in_attribute.calls)  # type: ignore[attr-defined]


class Counter:
    """Counts on the class."""

    calls: ClassVar[int] = 0

    def __call__(self) -> float:
        type(self).calls += 1
        return self.calls


def forget() -> None:
    """Be as a new process is."""
    global NUMBER
    GLOBAL[0] = NUMBER = Counter.calls = 0
    STATE[:] = 0
    (in_default.__defaults__ or ())[0][0] = 0
    vars(in_attribute).clear()


def fit(folder: Path, count: Callable[[], float], steps: int, *plugins: Any, **checkpoint: Any) -> tuple[Any, Any]:
    forget()
    batches = [(torch.full((3, 4), number / 10), torch.tensor([0, 1, 0])) for number in range(4)]
    saving = [h.SaveSchedule(h.At(steps=SAVED)), h.Checkpoint(folder, **checkpoint)]
    trainer = h.Trainer([h.RNGCapture(), *plugins, *saving], device="cpu")
    task = Task(count)
    return trainer.fit(task, batches, optimizer=lambda each: torch.optim.SGD(each, 0.1), steps=steps), task


@pytest.mark.parametrize(
    ("make", "restored"),
    [
        (lambda: in_list, (f"the global GLOBAL of {__name__} = [4]",)),
        (lambda: in_number, (f"the global NUMBER of {__name__} = 4",)),
        (in_closure, ("calls in in_closure.<locals>.count = 4",)),
        (lambda: in_default, ("default 0 of in_default = [4]",)),
        (Counter, ("Counter.calls = 4",)),
    ],
    ids=["list", "number", "closure", "default", "class"],
)
def test_what_code_counts_in_is_restored(
    tmp_path: Path, make: Callable[[], Callable[[], float]], restored: tuple[str, ...]
) -> None:
    _, whole = fit(tmp_path / "whole", make(), STEPS)
    first, _ = fit(tmp_path / "first", make(), SAVED)
    result, resumed = fit(tmp_path / "second", make(), STEPS, resume=first.last_checkpoint)
    assert (result.resume.guarantee, result.resume.restored) == ("exact", restored), result.resume.reasons
    assert torch.equal(resumed.model.weight, whole.model.weight)

    result, _ = fit(tmp_path / "third", make(), STEPS, resume=first.last_checkpoint, restore_attributes=False)
    where = restored[0].partition(" = ")[0]
    assert result.resume.reasons[0].startswith(f"the training changed {where}, which no checkpoint restores: it was")


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (
            in_array,
            f"the training changed the global STATE of {__name__}, which no checkpoint restores: it was an array",
        ),
        (in_attribute, "the training changed in_attribute.calls, which no checkpoint restores: it was 4, and is not"),
    ],
    ids=["array", "attribute"],
)
def test_what_cannot_be_restored_is_named(tmp_path: Path, count: Callable[[], float], reason: str) -> None:
    first, _ = fit(tmp_path / "first", count, SAVED)
    result, _ = fit(tmp_path / "second", count, STEPS, resume=first.last_checkpoint)
    assert result.resume.guarantee == "not exact"
    assert [each[: len(reason)] for each in result.resume.reasons] == [reason]


def test_what_the_training_never_changed_is_the_programs(tmp_path: Path) -> None:
    def count() -> float:
        return GLOBAL[-1]

    first, _ = fit(tmp_path / "first", count, SAVED)
    GLOBAL.append(7)
    try:
        result, _ = fit(tmp_path / "second", count, STEPS, resume=first.last_checkpoint)
        assert (result.resume.guarantee, result.resume.restored) == ("exact", ())
        assert GLOBAL == [0, 7]
    finally:
        GLOBAL.pop()


def test_a_list_that_a_handler_fills_has_all_of_it_after_a_resume(tmp_path: Path) -> None:
    def filled(name: str, steps: int, **options: Any) -> tuple[Any, list[float]]:
        losses: list[float] = []

        class Registered(h.Plugin):
            @h.on(h.TrainStart)
            def connect(self, run: h.Run, event: h.TrainStart) -> None:
                run.bus.on(h.BatchEnd, lambda run, event: losses.append(run.loss.item()))

        result, _ = fit(tmp_path / name, lambda: 1.0, steps, Registered(), **options)
        return result, losses

    _, whole = filled("whole", STEPS)
    first, _ = filled("first", SAVED)
    result, losses = filled("second", STEPS, resume=first.last_checkpoint)
    assert losses == whole
    assert result.resume.guarantee == "exact"


def test_an_observer_and_a_roll_back_leave_variables_alone(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watching(h.Plugin):
        policy = "observer"

        @h.on(h.BatchEnd)
        def see(self, run: h.Run, event: h.BatchEnd) -> None:
            seen.append(run.progress.batches)

    first, _ = fit(tmp_path / "first", lambda: 1.0, SAVED, Watching())
    result, _ = fit(tmp_path / "second", lambda: 1.0, STEPS, Watching(), resume=first.last_checkpoint)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (result.resume.guarantee, result.resume.restored) == ("exact", ())

    class Spoiling(h.Plugin):
        def __init__(self) -> None:
            self.returned = False

        @h.on(h.BatchEnd)
        def go_back(self, run: h.Run, event: h.BatchEnd) -> None:
            GLOBAL[0] += 1
            if run.progress.batches == SAVED + 2 and not self.returned:
                self.returned = True
                assert run.last_checkpoint is not None
                run.roll_back(storage.load(run.last_checkpoint), run.last_checkpoint)

    fit(tmp_path / "third", lambda: 1.0, STEPS, Spoiling())
    assert GLOBAL == [SAVED + 2 + STEPS - SAVED]


def test_data_is_no_variable() -> None:
    assert not reach._is_state([0] * (reach.LONG + 1))
    assert not reach._is_state(torch.zeros(reach.LARGE))
    assert not reach._is_state(nn.Linear(1, 1))
    assert not reach._is_state(np)
    assert reach._is_state({"calls": 0})
