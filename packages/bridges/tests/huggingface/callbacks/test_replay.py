"""Callbacks in a replay of a recorded run: what they would have asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
from heliograph.packages.bridges.tests.huggingface.callbacks.training import train_here
from heliograph_bridges.huggingface import from_huggingface
from heliograph_recorder import Recorder, replay
from heliograph_testing import check_plugin
from transformers import EarlyStoppingCallback, TrainerCallback


def test_early_stopping_stops_the_replay_where_it_would_have_stopped_the_run(tmp_path: Path) -> None:
    schedule = h.ValidationSchedule(steps=1)
    train_here(Recorder(tmp_path), schedule, epochs=3)
    stopped = train_here(h.ValidationSchedule(steps=1), EarlyStoppingCallback(3), epochs=3)
    replayed = replay(tmp_path, [from_huggingface(EarlyStoppingCallback(3))])
    first = next(each.request for each in replayed.asked if each.request.verb == "stop")
    assert (first.by, first.step) == ("early_stopping_callback", stopped.progress.steps)
    assert not replayed.failed


def test_what_a_callback_needs_and_no_recording_holds_is_said(tmp_path: Path) -> None:
    class ReadsModel(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            given["model"].parameters()

    train_here(Recorder(tmp_path), epochs=1)
    replayed = replay(tmp_path, [from_huggingface(ReadsModel())])
    assert "the model" in str(replayed.unheld["reads_model"])


def test_a_bridged_callback_is_in_the_recording(tmp_path: Path) -> None:
    train_here(Recorder(tmp_path), h.ValidationSchedule(steps=1), EarlyStoppingCallback(3), epochs=3)
    text = "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())
    assert '"early_stopping_callback"' in text
    assert "should_training_stop = True" in text


class Asks(EarlyStoppingCallback):
    """Has a method of every step, too, and asks for all."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        control.should_log = control.should_evaluate = control.should_save = state.global_step == 2
        return control

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        return control


def test_early_stopping() -> None:
    check_plugin(lambda: from_huggingface(EarlyStoppingCallback(1)))


def test_a_callback_that_asks_for_everything() -> None:
    check_plugin(lambda: from_huggingface(Asks(1, 0.5)))
