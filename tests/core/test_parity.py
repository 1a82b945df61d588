"""Losses and weights bit-equal to loops written by hand."""

from __future__ import annotations

from typing import Any

import torch
from heliograph import (
    GradientAccumulation,
    GradientClipping,
    LearningRate,
    Supervised,
    Trainer,
)
from heliograph.tests.kit import Batch, Losses, random_batches
from torch import Tensor, nn


def data(batches: int = 7) -> list[Batch]:
    return random_batches(batches, 8, inputs=16, outputs=1)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def ours(*plugins: Any, epochs: int = 3, scheduled: bool = False) -> tuple[list[float], list[Tensor]]:
    model, losses = make_model(), Losses()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
    torch.manual_seed(1)
    Trainer([*plugins, losses], device="cpu").fit(
        Supervised(model, nn.functional.mse_loss), data(), optimizer=optimizer, scheduler=scheduler, epochs=epochs
    )
    return losses.values, [each.detach() for each in model.parameters()]


def by_hand(
    *, accumulate: int = 1, clip: float | None = None, per_step: bool = False, per_epoch: bool = False, epochs: int = 3
) -> tuple[list[float], list[Tensor]]:
    model, losses, batches = make_model(), [], data()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch.manual_seed(1)
    for _ in range(epochs):
        for index, (inputs, targets) in enumerate(batches):
            loss = nn.functional.mse_loss(model(inputs), targets)
            losses.append(loss.item())
            window_start = index - index % accumulate
            window = min(accumulate, len(batches) - window_start)
            (loss / window if accumulate > 1 else loss).backward()  # type: ignore[no-untyped-call]
            if index % accumulate == accumulate - 1 or index == len(batches) - 1:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if per_step:
                    scheduler.step()
                optimizer.zero_grad()
        if per_epoch:
            scheduler.step()
    return losses, [each.detach() for each in model.parameters()]


def assert_equal(one: tuple[list[float], list[Tensor]], other: tuple[list[float], list[Tensor]]) -> None:
    assert one[0] == other[0]
    assert all(map(torch.equal, one[1], other[1]))


def test_plain() -> None:
    assert_equal(ours(), by_hand())


def test_accumulation_with_a_tail() -> None:
    assert_equal(ours(GradientAccumulation(3)), by_hand(accumulate=3))


def test_clipping() -> None:
    assert_equal(ours(GradientClipping(0.1)), by_hand(clip=0.1))


def test_scheduler_per_step() -> None:
    assert_equal(ours(LearningRate("step"), scheduled=True), by_hand(per_step=True))


def test_scheduler_per_epoch() -> None:
    assert_equal(ours(LearningRate("epoch"), scheduled=True), by_hand(per_epoch=True))


def test_all_together() -> None:
    plugins = [GradientAccumulation(3), GradientClipping(0.1), LearningRate("step")]
    assert_equal(ours(*plugins, scheduled=True), by_hand(accumulate=3, clip=0.1, per_step=True))


def test_the_hand_written_loops_differ_from_each_other() -> None:
    weights = [by_hand(accumulate=1)[1], by_hand(accumulate=3)[1], by_hand(clip=0.1)[1], by_hand(per_step=True)[1]]
    assert not any(torch.equal(one[0], other[0]) for one in weights for other in weights if one is not other)
