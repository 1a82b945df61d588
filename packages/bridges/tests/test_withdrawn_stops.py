"""A stop that a callback of another framework has asked for, and that a plugin has withdrawn, stays so in a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import heliograph.packages.bridges.tests.ignite.quietly
import lightning.pytorch as pl
import pytest
from heliograph.packages.bridges.tests.kills import KilledError, Kills
from heliograph.tests.kit import random_batches, sgd
from heliograph_bridges.huggingface import from_huggingface
from heliograph_bridges.ignite import from_ignite
from heliograph_bridges.lightning import from_lightning
from ignite.engine import Events
from torch import nn
from transformers import TrainerCallback


class OfHuggingFace(TrainerCallback):
    """Asks for a stop at the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_training_stop |= state.global_step == 1


class OfLightning(pl.Callback):
    """Asks for a stop at the first step."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 1:
            trainer.should_stop = True


class Unless(h.Plugin):
    """Takes a stop back at once."""

    @h.on(h.ShouldStop)
    def look(self, run: h.Run, event: h.ShouldStop) -> None:
        if run.control.should_stop:
            run.control.withdraw("stop", "too early")


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_huggingface(OfHuggingFace()),
        lambda: from_ignite(lambda engine: engine.terminate(), Events.ITERATION_COMPLETED(once=1)),
        lambda: from_lightning(OfLightning()),
    ],
    ids=["huggingface", "ignite", "lightning"],
)
def test_it_is_not_asked_for_again(make: Any, tmp_path: Path) -> None:
    def train(*others: h.Plugin) -> h.RunResult:
        saving = h.Checkpoint(tmp_path, every=h.Every(steps=1), resume="auto")
        task = h.Supervised(nn.Linear(4, 1), nn.functional.mse_loss)
        trainer = h.Trainer([h.RNGCapture(1), saving, make(), Unless(), *others], device="cpu")
        return trainer.fit(task, random_batches(4, 2, outputs=1), optimizer=sgd(), epochs=1)

    with pytest.raises(KilledError):
        train(Kills(2))
    result = train()
    assert (result.status, result.progress.steps) == ("completed", 4)
    assert [each.verb for each in result.history if "stop" in each.verb] == []
