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
from lightning.pytorch.callbacks import EarlyStopping


def recorded(folder: Path, *callbacks: Any, epochs: int = 6) -> Any:
    plugins = [Recorder(folder, losses=True), h.ValidationSchedule(epochs=1), *map(from_lightning, callbacks)]
    return kit.fit(h.Trainer(plugins, device="cpu"), validation=kit.class_batches(1), epochs=epochs)


def test_a_stop_is_recorded_in_the_name_of_the_callback(tmp_path: Path) -> None:
    result = recorded(tmp_path, EarlyStopping("val_loss", patience=1, mode="max"))
    assert (result.status, result.progress.epoch) == ("stopped", 2)
    title, reason = story(read(result.recording)).splitlines()[:2]
    assert_facts(title, "run: stopped", "lightning_early_stopping")
    assert_facts(reason, "val_loss did not improve", "1 records")


def test_a_replay_has_nothing_that_a_callback_could_receive(tmp_path: Path) -> None:
    result = recorded(tmp_path)
    report = replay(result.recording, [from_lightning(EarlyStopping("val_loss", patience=2, mode="max"))])
    assert report.unheld.keys() == {"lightning_early_stopping"}
    assert "the model" in str(report.unheld)
