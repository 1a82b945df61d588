"""A callback continues in a resumed run where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.bridges.tests.huggingface.callbacks.training import Task, batches, train_here
from heliograph.packages.bridges.tests.kills import KilledError, Kills
from heliograph.packages.tests.facts import has_facts
from heliograph.tests.kit import sgd
from heliograph_bridges.huggingface import from_huggingface
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState


def run_with(folder: Path, callback: Any, *plugins: h.Plugin, kill: int = 0, epochs: int = 4, **given: Any) -> Any:
    """Train with dropout, an evaluation and a save at every step; return the weights and the result."""
    task = Task()
    task.model.linear = torch.nn.Sequential(torch.nn.Dropout(0.2), task.model.linear)  # type: ignore[assignment]
    saving = [
        h.ValidationSchedule(steps=1),
        h.LogSchedule(steps=1),
        h.Checkpoint(folder, every=h.Every(steps=1), resume="auto"),
    ]
    bridged = from_huggingface(callback, **given)
    trainer = h.Trainer([h.RNGCapture(1), *saving, bridged, *plugins, *([Kills(kill)] if kill else [])], device="cpu")
    result = trainer.fit(task, batches(5), validation=batches(2, 1), optimizer=sgd(), epochs=epochs)
    return [each.tolist() for each in task.model.parameters()], result


@pytest.mark.parametrize("kill", [1, 4, 6, 7])
def test_early_stopping_stops_at_the_same_step_after_a_kill(tmp_path: Path, kill: int) -> None:
    """At step 7 the stop is asked for, saved with that step, and the run killed before it takes effect."""
    weights, whole = run_with(tmp_path / "whole", EarlyStoppingCallback(6))
    assert (whole.stopped_by, whole.progress.steps) == ("early_stopping_callback", 7)
    with pytest.raises(KilledError):
        run_with(tmp_path / "killed", EarlyStoppingCallback(6), kill=kill)
    callback = EarlyStoppingCallback(6)
    again, resumed = run_with(tmp_path / "killed", callback)
    assert (resumed.stopped_by, resumed.progress.steps) == ("early_stopping_callback", 7)
    assert callback.early_stopping_patience_counter == 6
    assert again == weights
    assert resumed.resume.reasons == ()


def test_a_stopped_run_continues_with_more_patience(tmp_path: Path) -> None:
    run_with(tmp_path, EarlyStoppingCallback(6))
    _, same = run_with(tmp_path, EarlyStoppingCallback(6))
    assert (same.status, same.progress.steps) == ("stopped", 7)
    with pytest.raises(KilledError):
        run_with(tmp_path, EarlyStoppingCallback(9), kill=8)
    _, more = run_with(tmp_path, EarlyStoppingCallback(9))  # whose checkpoint does not hold the former stop
    assert (more.stopped_by, more.progress.steps) == ("early_stopping_callback", 10)


class Counts(TrainerCallback):
    """Counts steps, and says nothing of its state."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.steps += 1


class CountsAsDict(Counts):
    """Has the state of a module or an optimizer."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class CountsFromState(Counts, ExportableState):
    """Builds itself in a way of its own."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.steps}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> CountsFromState:
        made = cls(**state["args"])
        made.steps = state["attributes"].get("count", 0)
        return made


class CountsInArguments(Counts, ExportableState):
    """Keeps what it counts among its arguments, and has no attributes."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def state(self) -> dict[str, Any]:
        return {"args": {"steps": self.steps}}


class CountsInArgumentsFromState(CountsInArguments):
    """Builds itself in a way of its own."""

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> CountsInArgumentsFromState:
        return cls(**state["args"])


class CountsInAttributes(Counts, ExportableState):
    """Has no arguments."""

    def state(self) -> dict[str, Any]:
        return {"attributes": {"steps": self.steps}}


@pytest.mark.parametrize(
    "kind", [CountsAsDict, CountsFromState, CountsInArguments, CountsInArgumentsFromState, CountsInAttributes]
)
def test_other_states(tmp_path: Path, kind: type[Counts]) -> None:
    with pytest.raises(KilledError):
        run_with(tmp_path, kind(), kill=3)
    callback = kind()
    run_with(tmp_path, callback, epochs=2)
    assert callback.steps == 10
    bridged = from_huggingface(kind())
    for _ in range(2):
        train_here(bridged, epochs=1)
    assert bridged.state_dict()["callback"]["states"][kind.__name__] in ({"steps": 5}, {"count": 5})


def test_a_callback_that_exports_only_its_arguments_resumes_with_those_of_the_program(tmp_path: Path) -> None:
    class Marked(TrainerCallback, ExportableState):
        def __init__(self, mark: str) -> None:
            self.mark = mark

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            pass

        def state(self) -> dict[str, Any]:
            return {"args": {"mark": self.mark}}

    with pytest.raises(KilledError):
        run_with(tmp_path, Marked("first"), kill=3)
    callback = Marked("second")
    _, result = run_with(tmp_path, callback, epochs=2)
    assert (callback.mark, result.progress.steps) == ("second", 10)


def test_a_callback_without_a_state_starts_fresh_and_the_resume_says_so(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        run_with(tmp_path, Counts(), kill=3)
    callback = Counts()
    _, result = run_with(tmp_path, callback, epochs=2)
    assert callback.steps == 7
    expected = ("untracked: Counts.steps", "starts fresh", "ExportableState")
    assert any(has_facts(reason, *expected) for reason in result.resume.reasons)


def test_the_state_of_the_trainer_continues(tmp_path: Path) -> None:
    class Keeps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.begun = state.global_step, state.epoch, len(state.log_history)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.history, self.best = list(state.log_history), (state.best_metric, state.best_global_step)

    whole = Keeps()
    run_with(tmp_path / "whole", whole, epochs=2)
    with pytest.raises(KilledError):
        run_with(tmp_path / "killed", Keeps(), kill=7)
    resumed = Keeps()
    run_with(tmp_path / "killed", resumed, epochs=2)
    assert whole.begun == (0, 0.0, 0)
    assert resumed.begun == (7, 1.4, 14)
    assert (resumed.history, resumed.best) == (whole.history, whole.best)


def test_the_options_of_a_callback_are_compared(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        run_with(tmp_path, EarlyStoppingCallback(6), kill=3)
    _, result = run_with(tmp_path, EarlyStoppingCallback(5))
    changed = ("EarlyStoppingCallback.early_stopping_patience", "6", "5")
    assert any(has_facts(each, *changed) for each in result.resume.reasons)


def test_a_run_that_goes_back_takes_the_callback_with_it(tmp_path: Path) -> None:
    class GoesBack(h.Plugin):
        done = False

        @h.on(h.BatchEnd, lane=h.Lane.REPORT)  # after the callback: its on_step_end is in the state
        def go(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.steps == 2:
                self.saved = run.state_dict()
            if run.progress.steps == 5 and not self.done:
                self.done = True
                run.roll_back(self.saved)

    callback = CountsAsDict()
    train_here(callback, GoesBack(), epochs=2)
    assert callback.steps == 10


def test_one_object_in_two_trainings_begins_anew() -> None:
    callback = EarlyStoppingCallback(1)
    bridged = from_huggingface(callback)
    steps = [train_here(h.ValidationSchedule(steps=1), bridged, epochs=4).progress.steps for _ in range(2)]
    assert steps[0] == steps[1]
