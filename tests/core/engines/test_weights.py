"""Modules with expanded tensors are saved, loaded and gone on from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import Every, Supervised, load_weights
from heliograph.core.engines.weights import is_spread, loadable
from heliograph.tests import kit
from heliograph.tests.kit import random_batches, saving
from torch import Tensor, nn


class Net(nn.Module):
    """A linear layer, and tensors that show one value, or one row, in many places."""

    row: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(1).expand(3), requires_grad=False)
        self.register_buffer("row", torch.zeros(3))
        self.register_buffer("rows", self.row.expand(4, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.row += 1
        output: Tensor = self.linear(inputs) * self.frozen + self.rows.mean(0)
        return output


def fit(folder: Path, epochs: int, make: Callable[[], Any] = Net, **options: Any) -> Any:
    torch.manual_seed(0)
    net = make()
    kit.fit(
        *saving(folder, Every(epochs=1), **options),
        task=Supervised(net, nn.functional.mse_loss),
        train=random_batches(3, inputs=3, outputs=3),
        optimizer=lambda parameters: torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1),
        epochs=epochs,
    )
    return net


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_equals_one_that_was_not(tmp_path: Path, background: bool) -> None:
    whole = fit(tmp_path / "whole", 2)
    fit(tmp_path / "halves", 1, background=background)
    resumed = fit(tmp_path / "halves", 2, resume="auto")

    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert resumed.rows.tolist() == [[6.0, 6.0, 6.0]] * 4
    resumed.row += 1
    assert resumed.rows[3].tolist() == [7.0, 7.0, 7.0]  # it still is the very row


def test_the_weights_alone(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    [path] = tmp_path.glob("*.pth")
    net = Net()
    load_weights(Supervised(net, nn.functional.mse_loss), path)

    assert net.rows.tolist() == [[3.0, 3.0, 3.0]] * 4


def test_values_that_differ_do_not_fit_into_one_place() -> None:
    with pytest.raises(
        ValueError, match=r"^rows is an expanded tensor, .* the checkpoint holds different values there"
    ):
        loadable(Net(), {"rows": torch.arange(12.0).reshape(4, 3)})


def test_nan_is_one_value() -> None:
    net = Net()
    loadable(net, {"rows": torch.full((4, 3), torch.nan)})

    assert net.row.isnan().all()


def test_what_is_spread() -> None:
    assert is_spread(torch.ones(1).expand(2))
    assert not is_spread(torch.ones(1, 3).expand(1, 3))
    assert not is_spread(torch.ones(2).to_sparse())


class Tied(nn.Module):
    """A layer whose weights are in its extra state, too, which has a tensor of a growing length besides."""

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.linear, self.replaces = nn.Linear(3, 3), replaces
        self.seen = torch.zeros(0)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, inputs.detach()[:1, 0]])
        output: Tensor = self.linear(inputs)
        return output

    def get_extra_state(self) -> Tensor | dict[str, Tensor]:
        return {"weight": self.linear.weight} if self.replaces else self.seen

    def set_extra_state(self, state: Any) -> None:
        if self.replaces:
            self.linear.weight = state["weight"]
        else:
            self.seen = state.clone()


def resumed(folder: Path, *, replaces: bool) -> Any:
    for epochs in (1, 2):
        net = fit(folder, epochs, partial(Tied, replaces=replaces), resume="auto")
    return net


def test_an_extra_state_is_of_any_shape(tmp_path: Path) -> None:
    assert len(resumed(tmp_path, replaces=False).seen) == 6


def test_a_parameter_that_would_be_trained_no_longer(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"replaced 1 parameters that the optimizer 'optimizer' trains, .* let it copy_"
    ):
        resumed(tmp_path, replaces=True)
