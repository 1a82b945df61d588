"""Requests that are taken back before they are served, and saves that are vetoed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
from heliograph import Every, Plugin, Run, on
from heliograph.tests import kit
from heliograph.tests.core.test_withdrawals import At, Seen, train
from heliograph_recorder import Recorder, replay

# Vetoes.


class SaveOnlyBest(Plugin):
    """What `should_save_checkpoint` is written for."""

    affects_training = False

    def __init__(self) -> None:
        self.best = float("inf")

    @on(h.ValidationEnd)
    def judge(self, run: Run, event: h.ValidationEnd) -> None:
        loss = event.metrics["validation/loss"]
        if loss < self.best:
            self.best = loss
        else:
            run.control.veto_save(f"{loss:.2f} is not better than {self.best:.2f}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: Any) -> None:
        self.best = state["best"]


class Losses(h.Supervised):
    """Validates to given losses, by the step."""

    values = (5.0, 4.0, 6.0, 3.0, 7.0, 2.0)

    def validation_step(self, run: Run, batch: Any) -> Any:
        return {"loss": self.values[run.progress.steps - 1]}


def best_only(folder: Path, steps: int, **options: Any) -> tuple[list[int], h.RunResult]:
    seen = Seen()
    every = Every(steps=1)
    plugins = [h.ValidationSchedule(every), h.SaveSchedule(every, at_end=False), SaveOnlyBest(), seen]
    task = Losses(kit.linear_classifier().model, kit.linear_classifier().loss_fn)
    checkpoint = h.Checkpoint(folder, **options)
    recorder = Recorder(folder / "recordings")
    data = kit.class_batches(6)
    result = kit.fit(
        *plugins, checkpoint, recorder, h.RNGCapture(), task=task, train=data, validation=data, steps=steps
    )
    return [step for name, step in seen.done if name == "save_point"], result


def test_only_the_best_is_saved_as_by_should_save_checkpoint(tmp_path: Path) -> None:
    saved, _ = best_only(tmp_path / "whole", 6)
    assert saved == [1, 2, 4, 6]


def test_only_the_best_is_saved_in_a_resumed_run_too(tmp_path: Path) -> None:
    first, _ = best_only(tmp_path, 3, resume="auto")
    assert first == [1, 2]
    rest, result = best_only(tmp_path, 6, resume="auto")
    assert rest == [4, 6]  # resumed after the second step, and the third is vetoed again
    assert result.resume is not None
    assert result.resume.reasons == ()


def test_the_story_says_who_took_what_back(tmp_path: Path) -> None:
    _, result = best_only(tmp_path, 6)
    story = " ".join(result.explain().split())
    assert "save that save_schedule requested" in story
    assert "served: vetoed by save_only_best" in story

    stop = At(h.BatchEnd, lambda run: run.control.stop("early"), 2).named("stopper")
    keep = At(h.BatchEnd, lambda run: run.control.withdraw("stop", "not yet"), 2)
    _, result = train(stop, keep, Recorder(tmp_path / "withdrawn"), folder=tmp_path / "x")
    story = " ".join(result.explain().split())
    assert "(early) was never served:" in story


def test_a_replay_shows_vetoes_and_withdrawals(tmp_path: Path) -> None:
    best_only(tmp_path, 6)
    replayed = replay(tmp_path / "recordings", [SaveOnlyBest()])
    assert [(each.step, each.verb) for each in replayed.requests("save_only_best")] == [
        (3, "veto_save"),
        (5, "veto_save"),
    ]

    class SaveNone(SaveOnlyBest):
        name = "save_only_best"

        @on(h.ValidationEnd)
        def judge(self, run: Run, event: h.ValidationEnd) -> None:
            run.control.withdraw("save", f"step {run.progress.steps}")

    replayed = replay(tmp_path / "recordings", [SaveNone()])
    assert len(replayed.asked) == 6


def test_a_replayed_schedule_sees_that_others_vetoed(tmp_path: Path) -> None:
    best_only(tmp_path, 6)
    replayed = replay(tmp_path / "recordings", [h.SaveSchedule(Every(steps=1), at_end=False)])
    assert len(replayed.asked) == 6


def test_the_story_says_what_a_veto_dropped_that_came_before_the_request(tmp_path: Path) -> None:
    """A veto at StepEnd holds for the save that the schedule asks for at BatchEnd."""

    class Early(Plugin):
        @on(h.StepEnd)
        def veto(self, run: Run, event: h.StepEnd) -> None:
            if run.progress.steps in (2, 3):
                run.control.veto_save("not now")

    saves = h.SaveSchedule(Every(steps=1), at_end=False)
    recorder = Recorder(tmp_path / "recording")
    result = kit.fit(Early(), saves, h.Checkpoint(tmp_path / "x"), recorder, train=kit.class_batches(6), steps=5)
    story = " ".join(result.explain().split())
    assert story.count("was never served") == 1
    assert "requested twice (every step)" in story
    assert "granted: 3 saves" in story


def test_the_story_serves_a_required_save_that_was_vetoed(tmp_path: Path) -> None:
    need = At(h.BatchEnd, lambda run: run.control.request_save("needed", required=True), 3).named("need")
    veto = At(h.Log, lambda run: run.control.veto_save("no"), 3)
    log = h.LogSchedule(Every(steps=1))
    recorder = Recorder(tmp_path / "recording")
    result = kit.fit(need, veto, log, h.Checkpoint(tmp_path / "x"), recorder, train=kit.class_batches(6), steps=5)
    assert "never served" not in result.explain()
