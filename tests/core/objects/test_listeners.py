"""Listeners that were connected when a run was saved, and are not when it is resumed, or the other way round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import heliograph as h
import pytest
import torch
from heliograph.core.objects.listeners import COUNTS, GONE, NEW, OBSERVE, SAME
from heliograph.tests.kit import sgd
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


class OfAnEpochWithNone(OfAnEpoch):
    """Says which attribute the handle will have."""

    def __init__(self) -> None:
        self._handle: Any = None


class FromTheStart(h.Plugin):
    """Connects a function at the start."""

    def __init__(self, function: Any, options: Any) -> None:
        self._function, self._options = function, options

    @h.on(h.TrainStart)
    def connect(self, run: h.Run, event: h.TrainStart) -> None:
        run.bus.on(h.BatchStart, self._function, **self._options)


class Connected(h.Plugin):
    """Connects something at the start, and something else in its place when the second step is done.

    Args:
        first: the function, and what `bus.on` takes beside it.
        second: the same of what takes its place.
        beside: a function that stays where it is.
        event: that they listen to.
    """

    resume_ignores = ("_first", "_second", "_beside")  # named below by what listens

    def __init__(self, first: Any, second: Any, beside: Any = None, event: type[h.Event] = h.BatchStart) -> None:
        self._first, self._second, self._beside, self._event = first, second, beside, event

    @h.on(h.TrainStart)
    def connect(self, run: h.Run, event: h.TrainStart) -> None:
        self._handle = run.bus.on(self._event, self._first[0], **self._first[1])
        if self._beside is not None:
            run.bus.on(self._event, self._beside)

    @h.on(h.StepEnd)
    def replace(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == 2:
            self._handle.remove()
            run.bus.on(self._event, self._second[0], **self._second[1])


class Scaler:
    """Scales the loss by what it holds, which grows."""

    def __init__(self, by: float, grows: float = 0.0) -> None:
        self.by, self.grows = by, grows
        self.log: list[float] = []

    def __call__(self, run: h.Run, event: h.BatchStart) -> None:
        self.scale(run, event)

    def scale(self, run: h.Run, event: h.BatchStart) -> None:
        self.by += self.grows
        self.log.append(self.by)
        run.control.scale_loss(self.by, "a test wants it")


def look(run: h.Run, event: h.Event) -> None:
    pass


def double(run: h.Run, event: h.GradientsReady) -> None:
    for parameter in run.task.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2)


def clip(run: h.Run, event: h.GradientsReady) -> None:
    for parameter in run.task.model.parameters():
        if parameter.grad is not None:
            parameter.grad.clamp_(-0.01, 0.01)


class PausingItself(h.Plugin):
    """Pauses its own handler when the second step is done."""

    @h.on(h.BatchStart)
    def scale(self, run: h.Run, event: h.BatchStart) -> None:
        scale(run, event)

    @h.on(h.StepEnd)
    def pause(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == 2:
            run.bus.signal(h.BatchStart).pause(self.scale, paused=True)


class ConnectingByBlinker(h.Plugin):
    """Connects a function as blinker does, when the second step is done."""

    @h.on(h.StepEnd)
    def connect(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == 2:
            run.bus.signal(h.BatchStart).connect(scale)


class Named(h.Plugin):
    """Is called as a function is."""

    name = "look"

    @h.on(h.BatchEnd)
    def look(self, run: h.Run, event: h.BatchEnd) -> None:
        pass


def saving(folder: Path, *plugins: Any, **checkpoint: Any) -> list[Any]:
    schedule = h.SaveSchedule(h.At(steps=[BATCHES, SAVED]))
    return [h.RNGCapture(), *plugins, schedule, h.Checkpoint(folder, keep_last=None, **checkpoint)]


def fit(folder: Path, steps: int, *plugins: Any, listen: Iterable[Any] = (), **checkpoint: Any) -> h.RunResult:
    torch.manual_seed(0)
    batches = [(torch.full((3, 4), number / 10), torch.tensor([0, 1, 0])) for number in range(BATCHES)]
    trainer = h.Trainer(saving(folder, *plugins, **checkpoint), device="cpu")
    for event, function, *options in listen:
        trainer.bus.on(event, function, **(options[0] if options else {}))
    task = h.Supervised(nn.Linear(4, 2), nn.functional.cross_entropy)
    return trainer.fit(task, batches, optimizer=sgd(), steps=steps)


class Attempts:
    """Two runs, the second of which resumes the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reasons(
        self, *plugins: Callable[[], Any], before: Iterable[Any] = (), now: Iterable[Any] = (), saved: int = SAVED
    ) -> Any:
        first = fit(self.folder / "first", saved, *(make() for make in plugins[:1]), listen=before)
        result = fit(
            self.folder / "second", STEPS, *(make() for make in plugins[-1:]), listen=now, resume=first.last_checkpoint
        )
        assert result.resume is not None
        assert (result.resume.reasons == ()) == (not result.resume.reasons)
        return result.resume.reasons


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    return Attempts(tmp_path)


def test_what_a_plugin_connects_later_is_named_where_it_is_not_connected_again(attempts: Attempts) -> None:
    assert attempts.reasons(Connecting) == (f"scale listened to BatchStart and does not: {GONE}",)


AGAIN = [partial(Connecting, again=True), OfAnEpoch, OfAnEpochWithNone, partial(Connecting, "observer")]


@pytest.mark.parametrize("make", AGAIN)
def test_it_is_not_where_it_is_nor_is_what_an_observer_connects(attempts: Attempts, make: Callable[[], Any]) -> None:
    assert attempts.reasons(make) == ()


def test_what_a_plugin_pauses_later_is_named(attempts: Attempts) -> None:
    assert attempts.reasons(Pausing) == (f"scale listens to BatchStart and did not: {NEW}",)


@pytest.mark.parametrize("make", [OfAnEpoch, OfAnEpochWithNone])
def test_what_listens_for_an_epoch_is_not_missed_where_the_save_is_between_two(attempts: Attempts, make: type) -> None:
    assert attempts.reasons(make, saved=BATCHES) == ()


REPLACED = {
    "a partial": (
        Connected((partial(scale, by=1.0), {}), (partial(scale, by=3.0), {})),
        f"scale listened to BatchStart with {{'by': 3.0}} and listens with {{'by': 1.0}}: {SAME}",
    ),
    "an object": (
        Connected((Scaler(1.0), {}), (Scaler(3.0), {})),
        "Scaler listened to BatchStart with {'by': 3.0, 'grows': 0.0} and listens with {'by': 1.0, 'grows': 0.0}: "
        f"{SAME}",
    ),
    "a method of an object": (
        Connected((Scaler(1.0).scale, {}), (Scaler(3.0).scale, {})),
        "Scaler.scale listened to BatchStart with {'by': 3.0, 'grows': 0.0} and listens with "
        f"{{'by': 1.0, 'grows': 0.0}}: {SAME}",
    ),
    "a filter": (
        Connected((scale, {"when": h.Every(steps=1)}), (scale, {"when": h.Every(steps=3)})),
        f"scale listened to BatchStart when 'every 3 steps' and listens when 'every step': {SAME}",
    ),
    "what a filter has counted": (
        Connected((scale, {}), (scale, {"when": h.Every(emissions=2)})),
        f"scale listened to BatchStart when 'every 2 emissions' and listens when 'always': {SAME}",
    ),
    "the order": (
        Connected((clip, {}), (clip, {}), double, h.GradientsReady),
        "the order of the listeners to GradientsReady was double, clip and is clip, double",
    ),
    "the lane": (
        Connected((clip, {"lane": h.Lane.MEASURE}), (clip, {"lane": h.Lane.PERSIST}), double, h.GradientsReady),
        "the order of the listeners to GradientsReady was double, clip and is clip, double",
    ),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_a_plugin_connects_instead_of_another_is_named(attempts: Attempts, what: str) -> None:
    plugin, reason = REPLACED[what]
    assert attempts.reasons(lambda: deepcopy(plugin)) == (reason,)


def test_what_the_filter_of_a_function_has_counted_is_named(tmp_path: Path) -> None:
    """No checkpoint holds it: a function has no name to keep it under."""
    within, outside = Attempts(tmp_path / "within"), Attempts(tmp_path / "outside")
    twice = (partial(scale, by=2.0), {"when": h.Every(emissions=2)})
    reason = (
        f"scale listened to BatchStart by a filter that had counted {SAVED} events and has counted 0: {COUNTS}, "
        f"{OBSERVE}"
    )
    assert within.reasons(lambda: FromTheStart(*twice)) == (reason,)
    listening = [(h.BatchStart, *twice)]
    assert outside.reasons(before=listening, now=listening) == (reason,)


def test_a_handler_that_a_plugin_pauses_is_named(attempts: Attempts) -> None:
    assert attempts.reasons(PausingItself) == (f"PausingItself.scale listens to BatchStart and did not: {NEW}",)


def test_what_a_plugin_connects_as_blinker_does_is_the_plugin_s(attempts: Attempts) -> None:
    assert attempts.reasons(ConnectingByBlinker) == (f"scale listened to BatchStart and does not: {GONE}",)


def test_a_function_that_is_called_as_a_plugin_is_outside_of_plugins(attempts: Attempts) -> None:
    assert attempts.reasons(Named, before=[(h.BatchStart, look)], now=[(h.BatchEnd, look)]) == ()


@pytest.mark.parametrize("method", ["scale", "__call__"])
def test_what_an_object_counts_that_listens_outside_of_plugins_is_named(attempts: Attempts, method: str) -> None:
    before, now = ([(h.BatchStart, getattr(Scaler(1.0, grows=0.5), method))] for _ in range(2))
    [reason] = attempts.reasons(before=before, now=now)
    assert reason.startswith(
        f"the training changed by of a {__name__}.Scaler, which no checkpoint restores: it was 3.5, and is 1.0"
    )


def test_functions_outside_of_plugins_may_come_and_leave(tmp_path: Path) -> None:
    listening = [(h.BatchStart, scale)]
    assert Attempts(tmp_path / "gone").reasons(before=listening) == ()
    assert Attempts(tmp_path / "new").reasons(now=listening) == ()


def test_functions_of_one_name_are_counted(attempts: Attempts) -> None:
    assert attempts.reasons(PausingOneOfTwo) == (f"{PausingOneOfTwo.NAME} listens to BatchEnd and did not: {NEW}",)


def test_who_listens_after_the_training_may_come_and_leave(attempts: Attempts) -> None:
    assert attempts.reasons(Closing) == ()


def test_a_plugin_that_is_gone_new_or_another_is_named_without_its_functions(tmp_path: Path) -> None:
    gone, new = Attempts(tmp_path / "gone"), Attempts(tmp_path / "new")
    clipping = partial(h.GradientClipping, 1.0)
    assert gone.reasons(Connecting, clipping) == (
        "plugin 'connecting' was there and is gone",
        "plugin 'gradient_clipping' is new",
    )
    assert "listen" not in str(new.reasons(clipping, Connecting))


def test_one_that_has_become_an_observer_is_not_compared(attempts: Attempts) -> None:
    assert attempts.reasons(partial(Looking, "critical"), partial(Looking, "observer")) == ()


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
    assert other.resume.reasons == ("the order of the listeners to BatchStart was first, second and is second, first",)


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
