"""Functions that listened when a run was saved, and do not when it is resumed, or the other way round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import heliograph as h
import pytest
import torch
from heliograph.core.unseen.listening import GONE, NEW
from torch import nn

SAVED, STEPS, BATCHES = 5, 8, 3


def scale(run: h.Run, event: h.BatchStart, by: float = 2.0) -> None:
    run.control.scale_loss(by, "a test wants it")


class Connecting(h.Plugin):
    """Connects a function when the second step is done, or at another event."""

    def __init__(self, policy: Any = "critical", *, again: bool = False) -> None:
        self.policy, self._again = policy, again
        self.connected = False

    @h.on(h.StepEnd)
    def connect(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == 2:
            run.bus.on(h.BatchStart, scale)
            self.connected = True

    @h.on(h.CheckpointLoaded)
    def connect_again(self, run: h.Run, event: h.CheckpointLoaded) -> None:
        if self.connected and self._again:
            run.bus.on(h.BatchStart, scale)

    def state_dict(self) -> dict[str, Any]:
        return {"connected": self.connected}

    def load_state_dict(self, state: Any) -> None:
        self.connected = state["connected"]


class OfAnEpoch(h.Plugin):
    """Connects a function when an epoch begins, and removes it when the epoch ends."""

    @h.on(h.EpochStart)
    def connect(self, run: h.Run, event: h.EpochStart) -> None:
        self._handle = run.bus.on(h.BatchStart, scale)

    @h.on(h.EpochEnd)
    def remove(self, run: h.Run, event: h.EpochEnd) -> None:
        self._handle.remove()


class Pausing(h.Plugin):
    """Connects a function at the start, and pauses it when the second step is done."""

    @h.on(h.TrainStart)
    def connect(self, run: h.Run, event: h.TrainStart) -> None:
        self._handle = run.bus.on(h.BatchStart, partial(scale, by=3.0))

    @h.on(h.StepEnd)
    def pause(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == 2:
            self._handle.pause()


class PausingOneOfTwo(Pausing):
    """Connects two functions of the same name, and pauses one of them."""

    name = "pausing"
    NAME: ClassVar = "PausingOneOfTwo.connect.<locals>.<lambda>"

    @h.on(h.TrainStart)
    def connect(self, run: h.Run, event: h.TrainStart) -> None:
        self._handle = run.bus.on(h.BatchEnd, lambda run, event: None)
        run.bus.on(h.BatchEnd, lambda run, event: None)


class Closing(h.Plugin):
    """Connects a function that listens to the end only, when the second step is done."""

    @h.on(h.StepEnd)
    def connect(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == 2:
            run.bus.on(h.TrainEnd, lambda run, event: None)


class Looking(h.Plugin):
    """Was written as one that can change the training; is declared as one that cannot."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    @h.on(h.StepEnd)
    def look(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == 2:
            run.bus.on(h.BatchStart, scale)


def saving(folder: Path, *plugins: Any, **checkpoint: Any) -> list[Any]:
    return [
        h.RNGCapture(), *plugins, h.SaveSchedule(h.At(steps=SAVED)), h.Checkpoint(folder, keep_last=None, **checkpoint)
    ]  # fmt: skip


def fit(folder: Path, steps: int, *plugins: Any, listen: Iterable[Any] = (), **checkpoint: Any) -> h.RunResult:
    torch.manual_seed(0)
    batches = [(torch.full((3, 4), number / 10), torch.tensor([0, 1, 0])) for number in range(BATCHES)]
    trainer = h.Trainer(saving(folder, *plugins, **checkpoint), device="cpu")
    for event, function in listen:
        trainer.bus.on(event, function)
    task = h.Supervised(nn.Linear(4, 2), nn.functional.cross_entropy)
    return trainer.fit(task, batches, optimizer=lambda each: torch.optim.SGD(each, 0.1), steps=steps)


class Legs:
    """Two runs, the second of which resumes the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reasons(self, *plugins: Callable[[], Any], before: Iterable[Any] = (), now: Iterable[Any] = ()) -> Any:
        first = fit(self.folder / "first", SAVED, *(make() for make in plugins[:1]), listen=before)
        result = fit(
            self.folder / "second", STEPS, *(make() for make in plugins[-1:]), listen=now, resume=first.last_checkpoint
        )
        assert result.resume is not None
        assert (result.resume.guarantee == "exact") == (not result.resume.reasons)
        return result.resume.reasons


@pytest.fixture
def legs(tmp_path: Path) -> Legs:
    return Legs(tmp_path)


def test_what_a_plugin_connects_later_is_named_where_it_is_not_connected_again(legs: Legs) -> None:
    assert legs.reasons(Connecting) == (f"scale listened to BatchStart and does not: {GONE}",)


@pytest.mark.parametrize("make", [partial(Connecting, again=True), OfAnEpoch, partial(Connecting, "observer")])
def test_it_is_not_where_it_is_nor_is_what_an_observer_connects(legs: Legs, make: Callable[[], Any]) -> None:
    assert legs.reasons(make) == ()


def test_what_a_plugin_pauses_later_is_named(legs: Legs) -> None:
    assert legs.reasons(Pausing) == (f"scale listens to BatchStart and did not: {NEW}",)


def test_functions_outside_of_plugins_may_come_and_leave(tmp_path: Path) -> None:
    listening = [(h.BatchStart, scale)]
    assert Legs(tmp_path / "gone").reasons(before=listening) == ()
    assert Legs(tmp_path / "new").reasons(now=listening) == ()


def test_functions_of_one_name_are_counted(legs: Legs) -> None:
    assert legs.reasons(PausingOneOfTwo) == (f"{PausingOneOfTwo.NAME} listens to BatchEnd and did not: {NEW}",)


def test_who_listens_after_the_training_may_come_and_leave(legs: Legs) -> None:
    assert legs.reasons(Closing) == ()


def test_a_plugin_that_is_gone_new_or_another_is_named_without_its_functions(tmp_path: Path) -> None:
    gone, new = Legs(tmp_path / "gone"), Legs(tmp_path / "new")
    clipping = partial(h.GradientClipping, 1.0)
    assert gone.reasons(Connecting, clipping) == (
        "plugin 'connecting' was there and is gone",
        "plugin 'gradient_clipping' is new",
    )
    assert "listen" not in str(new.reasons(clipping, Connecting))


def test_one_that_has_become_an_observer_is_taken_at_its_word(legs: Legs) -> None:
    assert legs.reasons(partial(Looking, "critical"), partial(Looking, "observer")) == ()


class Back(h.Plugin):
    """Rolls back once, when the sixth step is done and a function was connected."""

    def __init__(self) -> None:
        self._was_back, self._saved = False, dict[str, Any]()

    @h.on(h.BatchEnd)
    def back(self, run: h.Run, event: h.BatchEnd) -> None:
        if run.progress.steps == SAVED and not self._was_back:
            self._saved = deepcopy(run.state_dict())
        if run.progress.steps == SAVED + 1 and not self._was_back:
            assert isinstance(run, h.TrainRun)
            self._was_back = True
            run.bus.on(h.BatchStart, scale)
            run.roll_back(self._saved)


def test_a_roll_back_names_what_listens_since_then(tmp_path: Path) -> None:
    result = fit(tmp_path, STEPS, Back())
    assert result.resume is not None
    assert result.resume.reasons == (f"scale listens to BatchStart and did not: {NEW}",)


class First(h.Plugin):
    """Listens to each batch."""

    @h.on(h.BatchStart)
    def listen(self, run: h.Run, event: h.BatchStart) -> None:
        pass


class Second(First):
    """So does this."""


def test_another_order_of_plugins_is_named(tmp_path: Path) -> None:
    first = fit(tmp_path / "first", SAVED, First(), Second())
    same, other = (
        fit(tmp_path / name, STEPS, *plugins, resume=first.last_checkpoint)
        for name, plugins in {"same": (First(), Second()), "other": (Second(), First())}.items()
    )
    assert same.resume is not None
    assert other.resume is not None
    assert same.resume.reasons == ()
    assert other.resume.reasons == ("the order of plugins at BatchStart was first, second and is second, first",)


class FirstAtEnd(h.Plugin):
    """Listens to the end only."""

    @h.on(h.TrainEnd)
    def listen(self, run: h.Run, event: h.TrainEnd) -> None:
        pass


class SecondAtEnd(FirstAtEnd):
    """So does this."""


def test_the_order_at_the_end_of_the_training_may_be_another(tmp_path: Path) -> None:
    first = fit(tmp_path / "first", SAVED, FirstAtEnd(), SecondAtEnd())
    result = fit(tmp_path / "second", STEPS, SecondAtEnd(), FirstAtEnd(), resume=first.last_checkpoint)
    assert result.resume is not None
    assert result.resume.reasons == ()
