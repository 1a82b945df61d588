"""The life of a data module: prepared once, set up for a run, torn down however it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    EMA,
    Checkpoint,
    Compile,
    DataModule,
    EarlyStopping,
    Every,
    GradientAccumulation,
    HandlerTimes,
    JsonlLog,
    LearningRate,
    LoaderParams,
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
from heliograph_recorder import Recorder
from torch.utils.data import DataLoader

Make = Callable[..., Any]


class DiaryModule(DataModule):
    """Keeps a diary; fails where it is asked to."""

    loader_params = LoaderParams(batch_size=4, shuffle=True)

    def __init__(self, make: Make, fails: str = "", error: BaseException | None = None) -> None:
        self.diary: list[str] = []
        self.make, self.fails, self.error = make, fails, error or ArithmeticError("broken")

    def _note(self, what: str) -> None:
        self.diary.append(what)
        if what in self.fails.split():
            raise type(self.error)(f"{what} is broken")

    def prepare(self) -> None:
        self._note("prepare")

    def set_up(self) -> None:
        self._note("set_up")

    def train(self) -> Any:
        self._note("train")
        return self.make(8)

    def validation(self) -> Any:
        self._note("validation")
        return self.make(4)

    def test(self) -> Any:
        self._note("test")
        return {"a": self.make(4), "b": DataLoader(self.make(4), 2)}

    def tear_down(self) -> None:
        self._note("tear_down")


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
    assert info.value.__notes__ == ["heliograph: in train, epoch 0, batch 0, step 0"]


# A tear_down that fails.


# What it gives.
