"""The life of a data module: prepared once, set up for a run, torn down however it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    EMA,
    Checkpoint,
    Compile,
    EarlyStopping,
    Every,
    GradientAccumulation,
    HandlerTimes,
    JsonlLog,
    LearningRate,
    LogSchedule,
    NaNGuard,
    Preemption,
    ProgressBar,
    RNGCapture,
    SaveSchedule,
    TensorBoard,
    Trainer,
    ValidationSchedule,
)
from heliograph.packages.tests.facts import assert_each
from heliograph.tests.core.data.test_module import DiaryModule, Make
from heliograph_recorder import Recorder

# What plugins get of that.


def test_every_built_in_takes_a_run_that_fails_before_it_begins(drawing: Make, noisy: Make, tmp_path: Path) -> None:
    plugins: list[Any] = [
        Checkpoint(tmp_path / "c"), SaveSchedule(Every(epochs=1)), JsonlLog(tmp_path / "log.jsonl"), ProgressBar(),
        LogSchedule(Every(epochs=1)), EMA(0.9), RNGCapture(), Recorder(tmp_path / "r"), TensorBoard(tmp_path / "t"),
        GradientAccumulation(2), NaNGuard(), Preemption(), HandlerTimes(), Compile(), EarlyStopping(),
        ValidationSchedule(Every(epochs=1)), LearningRate("epoch"),
    ]  # fmt: skip
    with pytest.raises(ArithmeticError, match="set_up is broken") as info:
        Trainer(plugins, device="cpu").fit(
            noisy(), DiaryModule(drawing, fails="set_up"), epochs=1, optimizer=torch.optim.SGD
        )
    assert_each(info.value.__notes__, ("in train", "epoch 0, batch 0", "step 0"))


# A tear_down that fails.


# What it gives.
