"""StepCheck on several ranks: all repeat at the same step, with the same exchange of gradients."""

from __future__ import annotations

from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.spi import leaves
from heliograph.tests.kit import adam, random_batches
from heliograph.tests.ranks_pool import Pool
from heliograph_recorder import StepCheck, StepChecked
from heliograph_testing.chaos import Chaos, Fault
from torch import Tensor, nn

Left = tuple[dict[str, Tensor], list[str], tuple[str, ...]]


class Seen(h.Plugin):
    def __init__(self) -> None:
        self.checks: list[str] = []

    @h.on(StepChecked, optional=True)
    def note(self, run: h.Run, event: StepChecked) -> None:
        self.checks.append(event.difference)


def train(every: int | None, window: int, flips: bool, **options: Any) -> Left:
    """Train on this rank; return its weights and buffers, what was checked, and the warnings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    seen = Seen()
    plugins: list[Any] = [h.RNGCapture(), seen, *([h.GradientAccumulation(window)] if window > 1 else [])]
    plugins += [] if every is None else [StepCheck(every)]
    plugins += [Chaos([Fault("bit-in-gradient", count=4, rank=1)])] if flips else []
    engine = h.DDPEngine(device="cpu", **options)
    task = h.Supervised(model, nn.functional.mse_loss)
    result = h.Trainer(plugins, engine=engine).fit(task, random_batches(12), optimizer=adam(), steps=6)
    return {name: value.clone() for name, value in model.state_dict().items()}, seen.checks, result.warnings


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("as_view", [False, True])
def test_the_training_stays_as_it_is(ranks: Pool, window: int, as_view: bool) -> None:
    expected = ranks(2).run(train, None, window, False, gradient_as_bucket_view=as_view)
    found = ranks(2).run(train, 1, window, False, gradient_as_bucket_view=as_view)
    for (weights, checks, warnings), (others, _, _) in zip(found, expected, strict=True):
        assert (set(checks), len(checks), warnings) == ({""}, 5, ())
        for name, value in weights.items():
            assert leaves(value) == leaves(others[name]), name


def test_a_flipped_bit_on_one_rank_is_reported_by_all(ranks: Pool) -> None:
    (_, checks, warnings), (_, others, _) = ranks(2).run(train, 1, 1, True)
    assert [bool(text) for text in checks] == [bool(text) for text in others] == [False, False, True, False, False]
    assert warnings[0].startswith("StepCheck: step 3, repeated")
    assert "rank 1: the gradient" in warnings[0]
