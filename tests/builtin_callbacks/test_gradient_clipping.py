"""GradientClipping against torch's own by hand, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heliograph import (
    DeviceEngine,
    Every,
    GradientAccumulation,
    GradientClipping,
    GradientNorm,
    GradientsReady,
    Lane,
    Log,
    LogSchedule,
    Supervised,
    Trainer,
)
from torch import Tensor, nn

Make = Callable[..., Any]


def by_hand(
    task: Any,
    batches: list[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    n: int,
    norm: float | None,
    value: float | None,
    norm_type: float,
) -> list[float]:
    norms: list[float] = []
    parameters = list(task.model.parameters())
    for start in range(0, len(batches), n):
        window = batches[start : start + n]
        for inputs, targets in window:
            (nn.functional.mse_loss(task.model(inputs), targets) / len(window)).backward()  # type: ignore[no-untyped-call]
        norms.append(nn.utils.get_total_norm([each.grad for each in parameters], norm_type).item())
        if norm is not None:
            nn.utils.clip_grad_norm_(parameters, norm, norm_type)
        if value is not None:
            nn.utils.clip_grad_value_(parameters, value)
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("norm", "value", "norm_type"),
    [(0.1, None, 2.0), (1e9, None, 2.0), (None, 0.05, 2.0), (0.3, 0.05, 2.0), (0.1, None, math.inf), (0.1, None, 1.0)],
)
def test_equals_torch(
    task: Make, batches: Make, sgd: Any, weights: Any, n: int, norm: float | None, value: float | None, norm_type: float
) -> None:
    data, mine, theirs = batches(5), task(), task()
    plugins: list[Any] = [GradientClipping(norm, value=value, norm_type=norm_type), LogSchedule(Every(steps=1))]
    trainer = Trainer([*plugins, GradientAccumulation(n)], device="cpu")  # listed after, and still accumulated first
    logged: list[float] = []
    trainer.bus.on(Log, lambda run, event: logged.append(event.metrics["train/gradient_norm"]))
    trainer.fit(mine, data, optimizer=sgd, epochs=1)
    norms = by_hand(theirs, data, sgd(list(theirs.model.parameters())), n, norm, value, norm_type)

    assert all(map(torch.equal, weights(mine), [each.detach() for each in theirs.model.parameters()]))
    assert logged == norms


def test_gradients_are_within_bounds(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([GradientClipping(0.1)], device="cpu")
    norms: list[float] = []

    def measure(run: Any, event: GradientsReady) -> None:
        norms.append(nn.utils.get_total_norm([each.grad for each in run.task.model.parameters()]).item())

    trainer.bus.on(GradientsReady, measure, lane=Lane.REPORT)
    trainer.fit(task(), batches(3), optimizer=sgd, epochs=1)

    assert len(norms) == 3
    assert all(norm <= 0.1 + 1e-6 for norm in norms)


def test_the_norm_is_a_mean_over_the_steps_since_the_last_log(
    task: Make, batches: Make, sgd: Any, weights: Any
) -> None:
    data, mine, theirs = batches(4), task(), task()
    trainer = Trainer([GradientClipping(0.1), LogSchedule(Every(steps=4))], device="cpu")
    trainer.bus.on(Log, lambda run, event: None)  # who tracks asks first whether anybody will read it
    result = trainer.fit(mine, data, optimizer=sgd, epochs=1)
    norms = by_hand(theirs, data, sgd(list(theirs.model.parameters())), 1, 0.1, None, 2.0)

    assert result.metrics["train/gradient_norm"] == pytest.approx(sum(norms) / 4)


def test_nothing_is_tracked_where_nobody_logs(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([GradientClipping(0.1)], device="cpu")

    assert trainer.fit(task(), batches(2), optimizer=sgd, epochs=1).metrics == {}


def test_parameters_without_gradients(batches: Make) -> None:
    from heliograph import Supervised

    model = nn.Linear(4, 2)
    frozen = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), frozen], lr=0.1)
    trainer = Trainer([GradientClipping(value=0.1), LogSchedule(Every(steps=1))], device="cpu")
    trainer.bus.on(Log, lambda run, event: None)
    result = trainer.fit(Supervised(model, nn.functional.mse_loss), batches(1), optimizer=optimizer, epochs=1)

    assert result.metrics["train/gradient_norm"] > 0
    assert torch.equal(frozen, torch.ones(3))


def test_two_fits_are_equal_and_test_is_untouched(task: Make, batches: Make, sgd: Any, weights: Any) -> None:
    trainer = Trainer([GradientClipping(0.1)], device="cpu")
    first, second = task(), task()
    for each in (first, second):
        trainer.fit(each, batches(3), optimizer=sgd, epochs=1)
    trainer.test(first, batches(1))

    assert all(map(torch.equal, weights(first), weights(second)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs a bound"),
        ({"norm": 0.0}, "norm must.*more than 0"),
        ({"norm": math.nan}, "norm must.*more than 0"),
        ({"value": -1.0}, "value must.*more than 0"),
        ({"norm": 1.0, "norm_type": 0.0}, "norm_type must.*more than 0"),
    ],
)
def test_arguments_are_checked(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GradientClipping(**options)


def test_two_of_them_are_refused() -> None:
    with pytest.raises(ValueError, match="both claim clipping"):
        Trainer([GradientClipping(1.0), GradientClipping(2.0).named("other")], device="cpu")


class Words(nn.Module):
    """Looks indices up, some several times in a batch."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 2)

    def forward(self, indices: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.table(indices))
        return outputs


def train_words(*plugins: Any, sparse: bool, **options: Any) -> tuple[list[float], list[Tensor]]:
    """Return the norms that are logged, and the weights."""
    task = Supervised(Words(sparse=sparse), nn.functional.cross_entropy)
    data = [(torch.arange(6) * 2 % 5, torch.arange(6) % 2), (torch.tensor([1, 1, 1, 0]), torch.tensor([1, 0, 1, 1]))]
    trainer, norms = Trainer([*plugins, LogSchedule(Every(steps=1))], device="cpu", **options), []
    trainer.bus.on(Log, lambda run, event: norms.append(event.metrics.get("train/gradient_norm", 0.0)))
    trainer.fit(task, data, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5), epochs=2)
    return norms, [each.detach() for each in task.model.parameters()]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "bounds",
    [
        {"norm": 0.1},
        {"norm": 100.0},
        {"value": 0.02},
        {"norm": 0.3, "value": 0.02},
        {"norm": 0.1, "norm_type": math.inf},
        {"norm": 0.1, "norm_type": 1.0},
    ],
    ids=str,
)
def test_sparse_gradients_are_clipped_like_dense_ones(bounds: dict[str, float], n: int, precision: str) -> None:
    (norms, weights), (dense_norms, dense_weights) = (
        train_words(GradientClipping(**bounds), GradientAccumulation(n), sparse=sparse, precision=precision)
        for sparse in (True, False)
    )
    assert norms == pytest.approx(dense_norms, rel=1e-5)
    for weight, dense in zip(weights, dense_weights, strict=True):
        torch.testing.assert_close(weight, dense)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_of_sparse_gradients_is_measured_and_changes_nothing(norm_type: float) -> None:
    _, plain = train_words(sparse=True)
    measure = GradientNorm(norm_type=norm_type, per_module=True)
    norms, weights = train_words(measure, sparse=True)
    assert norms == pytest.approx(train_words(GradientNorm(norm_type=norm_type), sparse=False)[0], rel=1e-5)
    assert all(map(torch.equal, weights, plain))


@pytest.mark.parametrize("norm", [None, 1.0])
def test_a_sparse_gradient_without_values_has_the_norm_0(norm: float | None) -> None:
    table = nn.Embedding(3, 2, sparse=True)
    table.weight.grad = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 2), (3, 2), check_invariants=True)
    assert DeviceEngine("cpu").clip_gradients(table.parameters(), norm, math.inf) == 0.0
