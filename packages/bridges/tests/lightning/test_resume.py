"""The state of callbacks in checkpoints: killed and resumed, a training equals the uninterrupted one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import heliograph as h
import lightning.pytorch as pl
import pytest
import torch
from heliograph.tests import kit
from heliograph_bridges.lightning import from_lightning
from heliograph_testing import assert_resume_exact
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
)
from torch import nn

Made = tuple[h.Trainer, dict[str, Any]]
RANGE = torch.arange(48.0)


class Counter(pl.Callback):
    """Counts hooks, asks for a stop, draws, and adds to the checkpoint."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.drawn: torch.Tensor | None = None

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.count("epoch_start")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count("batch_end")
        self.drawn = torch.rand(2)
        trainer.should_stop = trainer.should_stop or self.counts["batch_end"] >= 17

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.count("epoch_end")
        with torch.no_grad():
            pl_module.model.weight.mul_(0.9)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = state_dict["counts"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["drawn"] = self.drawn

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.drawn = checkpoint["drawn"]


CALLBACKS: dict[str, Callable[[], Sequence[Any]]] = {
    "counter": lambda: [Counter()],
    "stopping": lambda: [EarlyStopping("val_loss", patience=2, mode="max")],
    "rates": lambda: [LearningRateMonitor()],
    "ema": lambda: [EMAWeightAveraging(decay=0.8, update_every_n_steps=2)],
}


def make(name: str) -> Made:
    torch.manual_seed(0)
    plugins = [h.RNGCapture(), h.LogSchedule(steps=2), h.ValidationSchedule(steps=3), h.GradientAccumulation(2)]
    trainer = h.Trainer([*plugins, *map(from_lightning, CALLBACKS[name]())], device="cpu")
    task = h.Supervised(nn.Linear(4, 2), nn.functional.cross_entropy)
    data = torch.utils.data.TensorDataset(RANGE.reshape(12, 4).sin(), RANGE[:12].long() % 2)
    optimizer = kit.sgd(momentum=0.9)
    return trainer, {"task": task, "train": data, "loader_params": {"batch_size": 2, "shuffle": True}} | {
        "validation": kit.class_batches(1),
        "optimizer": optimizer,
        "epochs": 5,
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CALLBACKS)
def test_killed_and_resumed_it_equals_the_uninterrupted_training(name: str) -> None:
    check = assert_resume_exact(lambda: make(name), kill_at=[8, ("epoch_end", 2)], save_every=2)
    assert (check.position, check.reasons, check.set_aside) == ("seeked", (), ())


def resumed(folder: Path, *callbacks: Any, steps: int = 4) -> h.RunResult:
    plugins = [*kit.saving(folder, h.Every(steps=1), resume="auto"), h.ValidationSchedule(epochs=1)]
    trainer = h.Trainer([*plugins, *map(from_lightning, callbacks)], device="cpu")
    return kit.fit(trainer, validation=kit.class_batches(1), steps=steps)


def test_a_training_that_was_stopped_stays_stopped(tmp_path: Path) -> None:
    first = resumed(tmp_path, EarlyStopping("val_loss", stopping_threshold=10.0), steps=8)
    assert (first.progress.steps, first.stopped_by) == (2, "lightning_early_stopping")
    again = resumed(tmp_path, EarlyStopping("val_loss", stopping_threshold=10.0), steps=8)
    assert (again.progress.steps, again.stopped_by) == (2, "lightning_early_stopping")


def test_what_a_callback_adds_to_a_checkpoint_is_in_ours_and_given_back(tmp_path: Path) -> None:
    resumed(tmp_path, first := Counter())
    state = torch.load(max(tmp_path.glob("*.pth")), weights_only=True)["plugins"]["lightning_counter"]
    assert state.keys() == {"key", "callback", "checkpoint"}
    assert state["key"] == "Counter"
    assert state["callback"] == {"counts": {"epoch_start": 2, "batch_end": 4, "epoch_end": 1}}
    assert state["checkpoint"].keys() == {"drawn"}  # neither the weights nor what else it was shown
    resumed(tmp_path, second := Counter(), steps=5)
    assert torch.equal(first.drawn, state["checkpoint"]["drawn"])  # type: ignore[arg-type]
    assert second.counts == {"epoch_start": 3, "batch_end": 5, "epoch_end": 2}


def test_the_state_of_a_callback_with_another_key_is_not_given(tmp_path: Path) -> None:
    resumed(tmp_path, EarlyStopping("val_loss"))
    result = resumed(tmp_path, stopper := EarlyStopping("val_accuracy", strict=False), steps=4)
    assert stopper.wait_count == 0
    (warning,) = result.warnings
    assert "state_key EarlyStopping{'monitor': 'val_loss', 'mode':" in warning


class Forgetful(pl.Callback):
    """Changes without a state."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *given: Any) -> None:
        self.batches += 1


def test_a_callback_that_changes_without_a_state_makes_a_resume_not_exact(tmp_path: Path) -> None:
    resumed(tmp_path, Forgetful())
    report = resumed(tmp_path, Forgetful(), steps=6).resume
    assert report is not None
    assert report.reasons
    assert "state_dict and changes batches" in " ".join(report.reasons)


def test_a_callback_is_for_one_training() -> None:
    plugin = from_lightning(EarlyStopping("val_loss"))
    trainer = h.Trainer([h.ValidationSchedule(epochs=1), plugin], device="cpu")
    kit.fit(trainer, validation=kit.class_batches(1))
    with pytest.raises(RuntimeError, match="lightning_early_stopping was already used"):
        kit.fit(trainer, validation=kit.class_batches(1))


class Own(pl.LightningModule):
    """A LightningModule as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Any) -> Any:
        return self.layer(inputs)


def test_a_users_own_module_resumes_exactly() -> None:
    def make_own() -> Made:
        trainer, options = make("stopping")
        return trainer, options | {"task": h.Supervised(Own(), nn.functional.cross_entropy)}

    check = assert_resume_exact(make_own, kill_at=[8], save_every=3)
    assert check.reasons == ()


class Toggle(h.Plugin):
    """Disables a plugin from one step to another."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    @h.on(h.BatchEnd)
    def act(self, run: h.Run, event: h.BatchEnd) -> None:
        if run.progress.steps == self.first:
            run.plugins.disable("lightning_counter")
        if run.progress.steps == self.last:
            run.plugins.enable("lightning_counter")


def test_a_callback_that_is_disabled_keeps_its_state_over_a_resume(tmp_path: Path) -> None:
    def train(steps: int) -> Counter:
        callback = Counter()
        plugins = [*kit.saving(tmp_path, h.Every(steps=1), resume="auto"), Toggle(2, 6), from_lightning(callback)]
        trainer = h.Trainer(plugins, device="cpu")
        if steps > 4:
            trainer.plugins.disable("lightning_counter")
        kit.fit(trainer, train=kit.class_batches(20), steps=steps)
        return callback

    assert train(4).counts == {"epoch_start": 1, "batch_end": 2}
    state = torch.load(max(tmp_path.glob("*.pth")), weights_only=True)["plugins"]["lightning_counter"]
    assert state["callback"] == {"counts": {"epoch_start": 1, "batch_end": 2}}
    assert train(9).counts == {"epoch_start": 1, "batch_end": 5}
