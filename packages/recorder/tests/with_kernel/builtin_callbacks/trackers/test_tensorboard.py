"""TensorBoard, read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from heliograph import Every, LogSchedule, TensorBoard, Trainer
from heliograph.tests.builtin_callbacks.test_tensorboard import Make, scalars
from heliograph_recorder import Recorder, replay


@pytest.mark.parametrize("measured", [True, False])
def test_a_replay_draws_what_was_logged(task: Make, batches: Make, sgd: Any, tmp_path: Path, measured: bool) -> None:
    live = [TensorBoard(tmp_path / "live")] if measured else []
    plugins: list[Any] = [LogSchedule(Every(steps=2)), *live, Recorder(tmp_path)]
    Trainer(plugins, device="cpu").fit(task(), batches(4), optimizer=sgd, epochs=1)
    replayed = replay(tmp_path, [TensorBoard(tmp_path / "again")])

    assert (replayed.unheld, replayed.failed) == ({}, {})
    curves = scalars(tmp_path / "again")
    assert [step for step, _ in curves["train/loss"]] == [2, 4]
    assert curves == (scalars(tmp_path / "live") if measured else {"train/loss": curves["train/loss"]})
