"""GradientNorm against torch's own, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heliograph import Every, GradientAccumulation, GradientClipping, GradientNorm, Log, LogSchedule, Task, Trainer
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

Make = Callable[..., Any]


class Two(Task):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def training_step(self, run: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.head(self.body(inputs)), targets)


def test_the_norms_are_those_of_accumulated_gradients(batches: Make, sgd: Any) -> None:
    data, mine, theirs = batches(4), Two(), Two()
    logged: list[dict[str, float]] = []
    trainer = Trainer(
        [GradientNorm(per_module=True), GradientAccumulation(2), LogSchedule(Every(steps=1))], device="cpu"
    )
    trainer.bus.on(Log, lambda run, event: logged.append(dict(event.metrics)))
    trainer.fit(mine, data, optimizer=sgd, epochs=1)

    both = [*theirs.body.parameters(), *theirs.head.parameters()]
    optimizer = sgd(both)
    for window, metrics in zip([data[:2], data[2:]], logged, strict=True):
        for batch in window:
            (theirs.training_step(None, batch) / 2).backward()  # type: ignore[no-untyped-call]
        for name, parameters in (("", both), ("/body", theirs.body.parameters()), ("/head", theirs.head.parameters())):
            norm = get_total_norm([each.grad for each in parameters if each.grad is not None])
            assert metrics[f"train/gradient_norm{name}"] == norm.item()
        optimizer.step()
        optimizer.zero_grad()


def test_every_measures_some_steps_only(batches: Make, sgd: Any) -> None:
    logged: list[bool] = []
    trainer = Trainer([GradientNorm(every=2), LogSchedule(Every(steps=1))], device="cpu")
    trainer.bus.on(Log, lambda run, event: logged.append("train/gradient_norm" in event.metrics))
    trainer.fit(Two(), batches(4), optimizer=sgd, epochs=1)
    assert logged == [False, True, False, True]


@pytest.mark.parametrize("every", [0, 1.5, True])
def test_an_interval_that_is_none_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="steps, at least 1"):
        GradientNorm(every=every)


def test_a_norm_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="number, more than 0"):
        GradientNorm(norm_type=-1)


def test_it_does_not_go_with_clipping_which_tracks_the_norm_itself() -> None:
    with pytest.raises(ValueError, match="both claim gradient_norm"):
        Trainer([GradientNorm(), GradientClipping(1.0)])
