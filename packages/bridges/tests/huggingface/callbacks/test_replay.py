"""Callbacks in recordings and replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
from heliograph.packages.bridges.tests.huggingface.callbacks.training import train_here
from heliograph_bridges.huggingface import from_huggingface
from heliograph_recorder import Recorder, replay
from heliograph_testing import check_plugin
from transformers import EarlyStoppingCallback


def test_a_replay_has_nothing_that_a_callback_could_receive(tmp_path: Path) -> None:
    train_here(Recorder(tmp_path), epochs=1)
    replayed = replay(tmp_path, [from_huggingface(EarlyStoppingCallback(3))])
    assert "the model" in str(replayed.unheld["early_stopping_callback"])


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
