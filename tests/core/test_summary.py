"""The summary of a model: layers, shapes of outputs, and counts of parameters."""

from __future__ import annotations

import logging
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.decoder = nn.Linear(4, 10, bias=False)
        self.decoder.weight = self.encoder.weight
        self.norm.requires_grad_(False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        features = self.norm(self.encoder(tokens) + torch.rand(()))
        return {"logits": self.decoder(features), "features": features}


def test_layers_have_shapes_and_parameters() -> None:
    result = h.summary(h.Supervised(Tied(), nn.functional.cross_entropy), torch.zeros(3, dtype=torch.int64))
    rows = [(layer.path, layer.kind, layer.output, layer.parameters) for layer in result.layers]
    assert rows == [
        ("model", "Tied", "logits [3, 10], features [3, 4]", 0),
        ("model.encoder", "Embedding", "[3, 4]", 40),
        ("model.norm", "BatchNorm1d", "[3, 4]", 8),
        ("model.decoder", "Linear", "[3, 10]", 40),
    ]


def test_shared_and_frozen_parameters_are_counted_once_and_named() -> None:
    result = h.summary(Tied())
    assert (result.parameters, result.trained) == (48, 40)
    assert [layer.path for layer in result.layers if layer.is_frozen] == ["task.norm"]
    assert [layer.shares for layer in result.layers] == [None, None, None, "task.encoder"]
    assert result.megabytes == pytest.approx((48 * 4 + 8 * 4 + 8) / 1e6)  # with the buffers of the norm
    assert_facts(result, "encoder: Embedding", "40", "norm: BatchNorm1d", "frozen", "shared with task.encoder", "48")
    assert {layer.output for layer in result.layers} == {None}


def test_the_call_changes_nothing() -> None:
    model = Tied()
    model.encoder.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    draws = torch.get_rng_state()
    h.summary(model, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.training, model.encoder.training, model.norm.training) == (True, False, True)
    assert not any(part._forward_hooks for part in model.modules())


def test_a_failed_call_leaves_no_hooks() -> None:
    model = Tied()
    with pytest.raises((IndexError, RuntimeError)):
        h.summary(model, torch.zeros(3))
    assert model.training
    assert not any(part._forward_hooks for part in model.modules())


@pytest.mark.parametrize("inputs", [(torch.zeros(2, 4),), {"input": torch.zeros(2, 4)}, torch.zeros(2, 4)])
def test_inputs_are_a_tensor_arguments_or_keywords(inputs: Any) -> None:
    assert h.summary(nn.Linear(4, 3), inputs).layers[0].output == "[2, 3]"


def test_depth_limits_the_layers_and_not_the_counts() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.Linear(3, 1))
    result = h.summary(model, depth=1)
    assert [layer.path for layer in result.layers] == ["task", "task.0", "task.1"]
    assert result.parameters == 13


class Two(h.Task):
    def __init__(self) -> None:
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)


def test_errors_name_the_modules() -> None:
    with pytest.raises(ValueError, match="no module"):
        h.summary(h.Task())
    with pytest.raises(ValueError, match="first, second") as error:
        h.summary(Two(), torch.zeros(1, 2))
    assert_facts(error.value, "summary(task.first, inputs)")
    assert len(h.summary(Two()).layers) == 2
    with pytest.raises(ValueError, match="depth"):
        h.summary(Two(), depth=0)


def test_the_log_has_the_summary_at_the_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "heliograph"):
        h.Trainer(device="cpu").fit(linear_classifier(), class_batches(2), optimizer=sgd(), epochs=1)
    assert "model: Linear" not in caplog.text
    with caplog.at_level(logging.DEBUG, "heliograph"):
        h.Trainer(device="cpu").fit(linear_classifier(), class_batches(2), optimizer=sgd(), epochs=1)
    assert "model: Linear" in caplog.text
