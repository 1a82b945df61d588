"""The learning-rate range test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import BatchEnd, Every, GradientAccumulation, LogSchedule, Plugin, Run, Supervised, Trainer, on, tuning
from heliograph.core.rehearsal.probes import LearningRateSearch, Ramp
from heliograph.tests.kit import adam, class_batches, linear_classifier, sgd
from heliograph.tests.messages import assert_facts
from torch import nn
from torch.utils.data import TensorDataset

SINK: list[Any] = []


@pytest.fixture(autouse=True)
def _empty() -> None:
    SINK.clear()


class Rates(Plugin):
    """Notes the rates of the groups."""

    @on(BatchEnd)
    def note(self, run: Run, event: BatchEnd) -> None:
        SINK.append([float(group["lr"]) for group in run.optimizer.param_groups])


def line(size: int = 32) -> list[Any]:
    """Return batches of a linear problem without noise."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, size, 3, generator=generator)
    return [(each, each @ torch.tensor([[1.0], [-2.0], [0.5]])) for each in inputs]


def regression() -> Supervised:
    torch.manual_seed(0)
    return Supervised(nn.Linear(3, 1), nn.functional.mse_loss)


def find(*plugins: Any, task: Any = None, train: Any = None, **options: Any) -> LearningRateSearch:
    task, train = regression() if task is None else task, line() if train is None else train
    return tuning.find_learning_rate(Trainer(plugins, device="cpu"), task, train, **{"optimizer": sgd(), **options})


def test_the_rates_rise_by_a_factor_and_the_losses_are_those_of_the_steps() -> None:
    found = find(Rates(), lowest=1e-4, highest=1e-2, steps=21)
    assert found.rates == pytest.approx(np.geomspace(1e-4, 1e-2, 21).tolist())
    assert [rate for (rate,) in SINK] == list(found.rates)
    task, batches = regression(), line()
    expected = []
    for step, rate in enumerate(found.rates):
        inputs, targets = batches[step % 4]
        loss = nn.functional.mse_loss(task.model(inputs), targets)
        expected.append(loss.item())
        for parameter, gradient in zip(
            task.model.parameters(), torch.autograd.grad(loss, list(task.model.parameters())), strict=True
        ):
            parameter.data.add_(gradient, alpha=-rate)
    assert found.losses == pytest.approx(expected)
    assert not found.diverged


def test_the_mean_is_corrected_for_its_beginning() -> None:
    found = find(lowest=1e-4, highest=1e-2, steps=12, smoothing=0.5)
    mean = 0.0
    for count, (loss, smoothed) in enumerate(zip(found.losses, found.smoothed, strict=True), 1):
        mean = 0.5 * mean + 0.5 * loss
        assert smoothed == pytest.approx(mean / (1 - 0.5**count))


def test_it_ends_where_the_loss_diverges_and_suggests_a_rate_that_trains() -> None:
    found = find(lowest=1e-4, highest=100.0, steps=60)
    assert found.diverged
    assert len(found.rates) < 60
    assert found.smoothed[-1] > 4 * min(found.smoothed)
    assert found.suggestion is not None
    assert 1e-3 < found.suggestion < 1.0
    result = Trainer(device="cpu").fit(regression(), line(), optimizer=sgd(found.suggestion), epochs=100)
    assert result.status == "completed"
    assert_facts(found, f"learning rate {found.suggestion:.3g}", f"{len(found.rates)} steps", "0.0001")
    assert repr(found) == f"<LearningRateSearch: {found}>"


def test_a_loss_that_is_not_a_number_ends_it() -> None:
    found = find(lowest=1.0, highest=1e30, steps=30, diverging=1e300)
    assert found.diverged
    assert all(np.isfinite(found.losses))


def test_a_first_loss_that_is_not_a_number_leaves_nothing_to_look_at() -> None:
    data = [(torch.full((2, 3), torch.nan), torch.zeros(2, 1))]
    with pytest.raises(ValueError, match=r"rate 0\.001"):
        tuning.find_learning_rate(Trainer(device="cpu"), regression(), data, optimizer=sgd(), lowest=1e-3, steps=4)


def test_a_loss_that_never_falls_has_no_suggestion() -> None:
    task = Supervised(nn.Linear(3, 1), lambda outputs, targets: outputs.sum() * 0 + 1)
    found = find(task=task, lowest=1e-3, highest=1.0, steps=20)
    assert found.suggestion is None
    assert_facts(found, "never fell", "20 steps")


def noisy(targets: Callable[[torch.Tensor], torch.Tensor]) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 3, generator=generator)
    return TensorDataset(inputs, targets(inputs))


SHUFFLED = {"loader_params": {"batch_size": 8, "shuffle": True}}


@pytest.mark.parametrize("seed", range(6))
def test_a_fall_within_the_noise_of_small_batches_is_not_suggested(seed: int) -> None:
    torch.manual_seed(seed)
    task = Supervised(nn.Linear(3, 1), nn.functional.mse_loss)
    found = find(task=task, train=noisy(lambda inputs: inputs.sum(1, keepdim=True)), **SHUFFLED)
    assert found.suggestion is not None
    assert 0.01 < found.suggestion < 0.5


@pytest.mark.parametrize("seed", range(6))
def test_rates_without_effect_have_no_suggestion(seed: int) -> None:
    torch.manual_seed(seed)
    task = Supervised(nn.Linear(3, 1), nn.functional.mse_loss)
    found = find(task=task, train=noisy(lambda inputs: inputs.sum(1, keepdim=True)), highest=1e-5, **SHUFFLED)
    assert found.suggestion is None


@pytest.mark.parametrize("steps", [3, 9, 10, 30])
@pytest.mark.parametrize("beta", [0.0, 0.9, 0.99])
def test_a_steep_fall_of_few_steps_is_found_without_noise(steps: int, beta: float) -> None:
    rates, losses = np.geomspace(1e-3, 1.0, steps).tolist(), [1.0] * (steps - steps // 2) + [0.5] * (steps // 2)
    ramp = Ramp(rates, beta, 4.0)
    ramp.used, ramp.losses = rates, losses
    ramp.smoothed = (np.cumsum(losses) / np.arange(1, steps + 1)).tolist()
    assert ramp.suggestion() == rates[steps - steps // 2]


def test_linear_ramp_accumulation_and_groups_keep_their_proportions() -> None:
    def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:], "lr": 0.1}])

    logs = LogSchedule(Every(steps=1))
    found = find(
        Rates(), GradientAccumulation(2), logs, ramp="linear", lowest=0.01, highest=0.03, steps=3, optimizer=grouped
    )
    assert found.rates == pytest.approx([0.01, 0.02, 0.03])
    assert np.allclose(SINK[::2], [[0.01, 0.005], [0.02, 0.01], [0.03, 0.015]])
    assert SINK[::2] == SINK[1::2]


def test_a_rate_that_is_a_tensor() -> None:
    task = linear_classifier()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(task.model.parameters(), lr=rate, capturable=False)
    found = find(Rates(), task=task, train=class_batches(3), optimizer=optimizer, lowest=0.01, highest=0.02, steps=2)
    assert np.allclose(SINK, [[0.01], [0.02]])
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.1
    assert len(found.rates) == 2


def test_the_curve(tmp_path: Path) -> None:
    found = find(lowest=1e-4, highest=100.0, steps=40)
    (axes,) = (figure := found.plot(tmp_path / "rates.png")).axes
    assert axes.get_xscale() == "log"
    assert [each.get_ydata()[0] for each in axes.lines[:2]] == [found.losses[0], found.smoothed[0]]
    assert axes.lines[2].get_xdata()[0] == found.suggestion
    assert (tmp_path / "rates.png").read_bytes()[:4] == figure._repr_png_()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": lambda each: None}, "leave scheduler= out"),
        ({"optimizer": {"one": adam()}}, "for one optimizer"),
        ({"lowest": 0.0}, "lowest= must be"),
        ({"lowest": 1.0, "highest": 0.5}, "highest= must be"),
        ({"steps": 1}, "steps= must be"),
        ({"ramp": "cosine"}, "ramp=.*got 'cosine'"),
        ({"smoothing": 1.0}, "smoothing"),
        ({"diverging": 1.0}, "diverging= must be"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(**options)
