"""Callbacks of Lightning in recordings and replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests import kit
from heliograph_bridges.lightning import from_lightning
from heliograph_recorder import Recorder, replay
from heliograph_recorder.explain.story import story
from heliograph_recorder.format.reader import read
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback


def recorded(folder: Path, *callbacks: Any, epochs: int = 6) -> Any:
    plugins = [Recorder(folder, losses=True), h.ValidationSchedule(epochs=1), *map(from_lightning, callbacks)]
    return kit.fit(h.Trainer(plugins, device="cpu"), validation=kit.class_batches(1), epochs=epochs)


def test_a_stop_is_recorded_in_the_name_of_the_callback(tmp_path: Path) -> None:
    result = recorded(tmp_path, EarlyStopping("val_loss", patience=1, mode="max"))
    assert (result.status, result.progress.epoch) == ("stopped", 2)
    title, reason = story(read(result.recording)).splitlines()[:2]
    assert_facts(title, "run: stopped", "lightning_early_stopping")
    assert_facts(reason, "val_loss did not improve", "1 records")


def test_early_stopping_can_be_replayed_with_other_options(tmp_path: Path) -> None:
    result = recorded(tmp_path)
    report = replay(result.recording, [from_lightning(EarlyStopping("val_loss", patience=2, mode="max"))])
    assert (report.failed, report.unheld) == ({}, {})
    (end,) = report.ends
    assert "lightning_early_stopping" in str(end)
    assert "epoch 3" in str(end)


def test_what_needs_the_model_is_switched_off_in_a_replay_and_the_report_says_why(tmp_path: Path) -> None:
    result = recorded(tmp_path)
    look = LambdaCallback(on_train_epoch_end=lambda trainer, module: list(module.parameters()))
    report = replay(result.recording, [from_lightning(look)])
    assert report.unheld.keys() == {"lightning_lambda_callback"}
    assert "A recording does not hold the modules" in str(report.unheld)
