"""Requests that are taken back before they are served, and saves that are vetoed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph import Control, Every, Plugin, Progress, Run, on
from heliograph.tests import kit
from heliograph.tests.messages import assert_each

EVENTS: tuple[Any, ...] = (h.EpochStart, h.BatchStart, h.BatchEnd, h.Log, h.ValidationEnd, h.SavePoint, h.ShouldStop, h.EpochEnd, h.LastBoundary, h.TrainEnd)  # fmt: skip  # noqa: E501
DONE: tuple[Any, ...] = (h.Log, h.ValidationEnd, h.SavePoint, h.EpochEnd)
VERBS = ("stop", "end_epoch", "log", "validation", "save")
Act = Callable[[Run], object]


class At(Plugin):
    """Does something at an event, in some steps."""

    asks = ("stop", "save", "validation", "log")
    affects_training = False

    def __init__(self, event: Any, act: Act, *steps: int) -> None:
        self.event, self.act, self.steps = event, act, steps

    @on(*EVENTS, optional=True)
    def handle(self, run: Run, event: h.Event) -> None:
        if isinstance(event, self.event) and (not self.steps or run.progress.steps in self.steps):
            self.act(run)


class Seen(Plugin):
    """Notes what was done, and after which step."""

    affects_training = False

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []

    @on(*DONE, optional=True, lane=h.Lane.MEASURE)
    def note(self, run: Run, event: h.Event) -> None:
        self.done.append((event.name, run.progress.steps))


def schedules(steps: int = 2) -> list[Plugin]:
    every = Every(steps=steps)
    plugins: list[Plugin] = [h.LogSchedule(every), h.ValidationSchedule(every, at_end=False)]
    return [*plugins, h.SaveSchedule(every, at_end=False)]


def train(*plugins: Plugin, folder: Path, steps: int = 6, **options: Any) -> tuple[list[tuple[str, int]], h.RunResult]:
    seen = Seen()
    given = [*schedules(), *plugins, seen, h.Checkpoint(folder)]
    result = kit.fit(*given, train=kit.class_batches(6), validation=kit.class_batches(1), steps=steps, **options)
    return seen.done, result


def done_at(*steps: int) -> list[tuple[str, int]]:
    return [(name, step) for step in steps for name in ("log", "validation_end", "save_point")]


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_withdrawn_is_not_done(verb: Any) -> None:
    control = Control(Progress())
    for ask in (control.stop, control.end_epoch, control.request_log, control.request_validation, control.request_save):
        ask("first")
    assert control.withdraw(verb, "changed my mind", by="me") is True
    assert set(control.open_requests()) == set(VERBS) - {verb}
    assert (control.history[-1].verb, control.history[-1].by) == (f"withdraw_{verb}", "me")
    assert control.withdraw(verb, "again") is False
    assert len(control.history) == 6


def test_who_asks_again_is_served() -> None:
    control = Control(Progress())
    control.request_save("first")
    control.withdraw("save", "no")
    control.request_save("second")
    assert control.should_save
    assert control.open_requests()["save"].reason == "second"


def test_what_is_required_is_not_withdrawn_whoever_asked_first() -> None:
    control = Control(Progress())
    control.request_save("a schedule")
    control.request_save("the machine goes", required=True)
    control.stop("a stopper")
    control.stop("the machine goes", required=True)
    assert [control.withdraw(verb, "no") for verb in ("save", "stop")] == [False, False]
    assert control.should_save
    assert control.stop_request is not None
    assert control.stop_request.reason == "a stopper"


def test_what_cannot_be_withdrawn() -> None:
    with pytest.raises(ValueError, match="stop, end_epoch, log, validation,"):
        Control(Progress()).withdraw("skip_batch", "no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("event", "verb", "left"),
    [
        (h.BatchEnd, "log", [("validation_end", 4), ("save_point", 4)]),
        (h.BatchEnd, "validation", [("log", 4), ("save_point", 4)]),
        (h.Log, "validation", [("log", 4), ("save_point", 4)]),
        (h.ValidationEnd, "save", [("log", 4), ("validation_end", 4)]),
        (h.SavePoint, "save", done_at(4)),  # it is being served
    ],
)
def test_withdrawn_at_one_boundary_the_schedule_goes_on(event: Any, verb: Any, left: Any, tmp_path: Path) -> None:
    withdraw = At(event, lambda run: run.control.withdraw(verb, "not now"), 4)
    done, result = train(withdraw, folder=tmp_path)
    assert [each for each in done if each[0] != "epoch_end"] == [*done_at(2), *left, *done_at(6)]
    facts = [] if event is h.SavePoint else [("step 4", "at", f"withdraw_{verb}", "not now")]
    assert_each([each for each in result.history if "withdraw" in each.verb], *facts)
    assert result.warnings == ()


def test_a_stop_is_withdrawn_by_the_last_word(tmp_path: Path) -> None:
    stop = At(h.BatchEnd, lambda run: run.control.stop("early"), 2).named("stopper")
    keep = At(h.ShouldStop, lambda run: run.control.withdraw("stop", "not yet"), 2)
    _, result = train(stop, keep, folder=tmp_path)
    assert (result.status, result.progress.steps, result.stopped_by) == ("completed", 6, None)


def test_an_end_of_the_epoch_is_withdrawn(tmp_path: Path) -> None:
    ends = At(h.BatchEnd, lambda run: run.control.end_epoch("short"), 2, 3).named("ender")
    keeps = At(h.BatchEnd, lambda run: run.control.withdraw("end_epoch", "longer"), 2)
    done, _ = train(ends, keeps, folder=tmp_path)
    assert [each for each in done if each[0] == "epoch_end"] == [("epoch_end", 3)]


# Vetoes.


@pytest.mark.parametrize("event", [h.BatchStart, h.BatchEnd, h.Log, h.ValidationEnd])
def test_a_vetoed_save_writes_nothing_and_the_next_one_does(event: Any, tmp_path: Path) -> None:
    steps = (3,) if event is h.BatchStart else (4,)
    veto = At(event, lambda run: run.control.veto_save("no better"), *steps)
    done, result = train(veto, folder=tmp_path)
    assert [step for name, step in done if name == "save_point"] == [2, 6]
    assert [name for name, step in done if step == 4] == ["log", "validation_end"]
    assert [each.verb for each in result.history if each.by == "at"] == ["veto_save"]
    assert result.warnings == ()


def test_vetoes_at_every_boundary_are_counted(tmp_path: Path) -> None:
    veto = At(h.BatchEnd, lambda run: run.control.veto_save("never"))
    done, result = train(veto, folder=tmp_path)
    assert not any(name == "save_point" for name, _ in done)
    assert [(each.step, each.times) for each in result.history if each.verb == "veto_save"] == [(1, 5), (6, 1)]
    assert result.last_checkpoint is None
    assert_each(result.warnings, (tmp_path, "vetoed or withdrawn", "by at"))


def test_a_veto_where_nothing_is_due_does_not_reach_the_next_boundary(tmp_path: Path) -> None:
    done, _ = train(At(h.BatchEnd, lambda run: run.control.veto_save("odd"), 1, 3, 5), folder=tmp_path)
    assert [step for name, step in done if name == "save_point"] == [2, 4, 6]


def test_a_veto_within_a_window_lasts_until_its_boundary(tmp_path: Path) -> None:
    """The third micro-batch of four; the boundary is after the fourth."""

    class Third(At):
        @on(h.BatchEnd)
        def veto(self, run: Run, event: h.BatchEnd) -> None:
            if run.progress.batch == 3:
                run.control.veto_save("too early")

    seen = Seen()
    plugins = [h.SaveSchedule(Every(steps=1), at_end=False), h.Checkpoint(tmp_path), h.GradientAccumulation(2)]
    kit.fit(*plugins, Third(h.TrainEnd, lambda run: None), seen, train=kit.class_batches(8))
    assert [step for name, step in seen.done if name == "save_point"] == [1, 3, 4]


@pytest.mark.parametrize("event", [h.SavePoint, h.ShouldStop])
def test_a_veto_that_comes_too_late_is_an_error(event: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^control.veto_save .*in a handler"):
        train(At(event, lambda run: run.control.veto_save("late")), folder=tmp_path)


def test_the_last_save_can_be_vetoed_too(tmp_path: Path) -> None:
    seen = Seen()
    plugins = [h.SaveSchedule(Every(steps=4)), h.Checkpoint(tmp_path), seen]
    veto = At(h.LastBoundary, lambda run: run.control.veto_save("bad"))
    result = kit.fit(*plugins, veto, train=kit.class_batches(6))
    assert [each for each in seen.done if each[0] == "save_point"] == [("save_point", 4)]
    assert result.warnings == ()


def test_a_preempted_run_is_saved_whoever_vetoes(tmp_path: Path) -> None:
    veto = At(h.BatchEnd, lambda run: run.control.veto_save("never"))
    kill = At(h.BatchStart, lambda run: os.kill(os.getpid(), signal.SIGUSR1), 3).named("killer")
    withdraw = At(h.BatchEnd, lambda run: [run.control.withdraw(verb, "no") for verb in ("stop", "save")]).named(
        "withdraws"
    )
    with pytest.raises(SystemExit):
        train(kill, h.Preemption(), veto, withdraw, folder=tmp_path)
    (checkpoint,) = tmp_path.rglob("*.pth")
    state = torch.load(checkpoint, weights_only=True)
    assert state["progress"]["steps"] == 4


# A stop that is vetoed is in the checkpoint.


class Kill(Plugin):
    """Interrupts the run after the checkpoint of a step."""

    affects_training = False

    def __init__(self, step: int | None) -> None:
        self.step = step

    @on(h.CheckpointSaved)
    def kill(self, run: Run, event: h.CheckpointSaved) -> None:
        if run.progress.steps == self.step:
            raise KeyboardInterrupt


def train_with_vetoes(folder: Path, *plugins: Plugin, kill_at: int | None = None) -> h.RunResult:
    """Train for 20 steps unless a stop of step 3, vetoed until step 7, ends the run; it may be killed at a save."""

    def veto(run: Run) -> None:
        if run.progress.steps < 7:
            run.control.veto_stop("fewer than 7")

    stops = At(h.BatchEnd, lambda run: run.control.stop("enough"), 3).named("stops_at_3")
    vetoes = At(h.ShouldStop, veto).named("at_least_7")
    saves = h.RNGCapture(), h.Checkpoint(folder, every=Every(steps=1), resume="auto")
    given = *saves, stops, vetoes, *plugins, Kill(kill_at)
    return kit.fit(*given, train=kit.class_batches(5), steps=20, on_interrupt="return")


@pytest.mark.parametrize("kill_at", [2, 3, 4, 6, 7])
def test_a_resumed_run_stops_where_the_veto_of_an_earlier_stop_ends(tmp_path: Path, kill_at: int) -> None:
    killed = train_with_vetoes(tmp_path, kill_at=kill_at)
    assert (killed.status, killed.progress.steps) == ("interrupted", kill_at)
    resumed = train_with_vetoes(tmp_path)
    assert resumed.resume is not None
    assert (resumed.resume.step, resumed.resume.reasons) == (kill_at, ())
    assert (resumed.status, resumed.progress.steps) == ("stopped", 7)
    assert (resumed.stopped_by, resumed.reason) == ("stops_at_3", "enough")


def test_a_stop_survives_several_resumes_unless_it_is_withdrawn(tmp_path: Path) -> None:
    for kill_at in (3, 5):
        train_with_vetoes(tmp_path, kill_at=kill_at)
    takes_back = At(h.BatchEnd, lambda run: run.control.withdraw("stop", "go on"), 6).named("takes_back")
    assert train_with_vetoes(tmp_path, takes_back, kill_at=6).progress.steps == 6
    assert train_with_vetoes(tmp_path).status == "completed"
