"""Trackers of transformers and callbacks of TRL, as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.bridges.tests.huggingface.callbacks.training import INTEGRATIONS, batches, train_here
from heliograph.tests.kit import sgd
from heliograph_bridges.huggingface import from_huggingface
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


def schedules() -> list[h.Plugin]:
    return [h.LogSchedule(steps=2), h.ValidationSchedule(epochs=1, at_end=False)]


def test_tensor_board(tmp_path: Path) -> None:
    train_here(
        *schedules(),
        from_huggingface(INTEGRATIONS.TensorBoardCallback(), {"output_dir": str(tmp_path)}),
        train=4,
        epochs=1,
    )
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert set(events.Tags()["scalars"]) == {
        "train/loss", "train/learning_rate", "train/epoch", "eval/loss",
    }  # fmt: skip
    assert [each.step for each in events.Scalars("train/loss")] == [2, 4]
    assert '"num_train_epochs": 1' in events.Tensors("args/text_summary")[0].tensor_proto.string_val[0].decode()


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    bridged = from_huggingface(INTEGRATIONS.WandbCallback(), {"output_dir": str(tmp_path)})
    result = train_here(*schedules(), bridged, train=4, epochs=1)
    summary, config, rows = dict(wandb.run.summary), dict(wandb.config), wandb.run.step
    wandb.finish()
    assert rows == 3  # two logs and an evaluation
    assert summary["train/global_step"] == 4
    assert summary["train/loss"] == result.metrics["train/loss"]
    assert summary["eval/loss"] == result.metrics["validation/loss"]
    assert config["num_train_epochs"] == 1
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert not bridged.affects_training


class Language(h.Task):
    """A language model of transformers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        self.model = GPT2LMHeadModel(config)

    def training_step(self, run: h.Run, batch: Any) -> Any:
        return self.model(input_ids=batch, labels=batch).loss


def test_bema_of_trl(tmp_path: Path) -> None:
    """Its average is computed again here, from the weights after every step."""
    trl = pytest.importorskip("trl")
    task, weights = Language(), list[torch.Tensor]()

    class Keeps(h.Plugin):
        @h.on(h.StepEnd)
        def keep(self, run: h.Run, event: h.StepEnd) -> None:
            weights.append(task.model.lm_head.weight.detach().clone())

    first = task.model.lm_head.weight.detach().clone()
    callback = trl.BEMACallback(update_freq=2, ema_power=0.5, bias_power=0.2, lag=10)
    bridged = from_huggingface(callback, {"output_dir": str(tmp_path)})
    tokens = [(torch.arange(16).reshape(2, 8) + step) % 11 for step in range(4)]
    h.Trainer([bridged, Keeps()], device="cpu").fit(task, tokens, optimizer=sgd(), epochs=1)
    ema = first.clone()
    for step in (2, 4):
        beta, alpha = (10 + step) ** -0.5, (10 + step) ** -0.2
        ema = (1 - beta) * ema + beta * weights[step - 1]
        averaged = ema + alpha * (weights[step - 1] - first)
    torch.testing.assert_close(callback.running_model.lm_head.weight, averaged)
    assert json.loads((tmp_path / "bema/config.json").read_text())["vocab_size"] == 11


def test_a_reference_model_of_trl_is_kept_in_step() -> None:
    trl = pytest.importorskip("trl")
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    reference, model = nn.Linear(4, 1), nn.Linear(4, 1)
    callback = trl.trainer.callbacks.SyncRefModelCallback(reference, None)
    bridged = from_huggingface(callback, {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0})
    h.Trainer([bridged], device="cpu").fit(
        h.Supervised(model, nn.functional.mse_loss), batches(5), optimizer=sgd(), steps=4
    )
    assert torch.equal(reference.weight, model.weight)


def test_callbacks_of_trl_that_need_its_trainer_or_draw_a_bar() -> None:
    trl = pytest.importorskip("trl")
    with pytest.raises(ValueError, match="RichProgressCallback cannot run"):
        from_huggingface(trl.RichProgressCallback())
    holder = trl.LogCompletionsCallback.__new__(trl.LogCompletionsCallback)
    with pytest.raises(ValueError, match=r"methods of a transformers.Trainer"):
        from_huggingface(holder)
